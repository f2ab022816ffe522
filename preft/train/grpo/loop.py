"""The loop: push the policy, sample, score, learn, and write down what happened."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from preft.config.grpo import GrpoRecipe
from preft.config.progress import Progress
from preft.rewards.registry import RewardSum, Sample, Scores
from preft.train.grpo.checkpoint import save_checkpoint
from preft.train.grpo.loss import group_advantages
from preft.train.grpo.prompts import PromptSet
from preft.train.grpo.rollout import Completion, Sampler
from preft.train.grpo.update import Updater
from preft.train.trainer import read_metrics
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import extract_adapter

_log = logging.getLogger(__name__)


class RowLog:
    """Appends rows with a `step` to a file of JSON lines.

    Args:
        path: The file.
        step: Rows of later steps, which a resumed run makes anew, are dropped; 0 begins the file anew.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [row for row in read_metrics(path) if row["step"] <= step] if step else []
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows."""
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@dataclass(frozen=True)
class Loop:
    """What a run works with.

    Attributes:
        recipe: How.
        handle: The model's adapters; the one in use is trained.
        updater: Learns.
        sampler: Samples.
        prompts: To sample from.
        rewards: Score.
        metrics: Receives each step's metrics.
        samples: Receives some of each step's completions.
        checkpoints: Their folder.
        run: What the run is, for its checkpoints.
        evaluate: Called after `train.eval_every` steps; returns metrics.
        progress: Told of every step, or None.
    """

    recipe: GrpoRecipe
    handle: AttachedModel
    updater: Updater
    sampler: Sampler
    prompts: PromptSet
    rewards: RewardSum
    metrics: RowLog
    samples: RowLog
    checkpoints: Path
    run: Mapping[str, Any]
    evaluate: Callable[[], dict[str, float]] | None
    progress: Progress | None

    def __call__(self, start: int) -> None:
        """Takes the steps from `start` on. An interruption leaves a checkpoint of the last complete step.

        Raises:
            PreftError: A completion, a reward or an update failed; see there.
        """
        settings = self.recipe.train
        done = start
        try:
            for step in range(start, settings.max_steps):
                row = self.step(step)
                done = step + 1
                self.metrics.add([{"step": done, **row}])
                if settings.eval_every and self.evaluate and done % settings.eval_every == 0:
                    self.metrics.add([{"step": done, **self.evaluate()}])
                if settings.save_every and done % settings.save_every == 0:
                    self._save(done)
                if self.progress is not None:
                    self.progress.advance()
        except (KeyboardInterrupt, SystemExit):
            self._save_interrupted(done)
            raise

    def step(self, step: int) -> dict[str, float]:
        """Takes one step.

        Args:
            step: Its number, from 0.

        Returns:
            Its metrics.
        """
        settings = self.recipe.rollout
        began = time.monotonic()
        self.sampler.push(extract_adapter(self.handle, str(self.handle.active)))
        prompts = self.prompts.of_step(step, settings.prompts, self.recipe.seed)
        completions = self.sampler.sample(prompts, settings.group_size, occasion=f"step {step}")
        sampled = time.monotonic()
        scores = score(self.rewards, completions)
        scored = time.monotonic()
        advantages, level = group_advantages(
            torch.tensor(scores.total, dtype=torch.float64), settings.group_size, self.recipe.train.scale_rewards
        )
        updates = self.updater(completions, advantages.tolist(), step)
        self.samples.add(_rows(step + 1, completions, scores, self.recipe.train.keep_samples))
        _log.debug("step %d: reward %.4f", step + 1, _mean(scores.total))
        return {
            **updates,
            "reward": _mean(scores.total),
            "reward_std": float(torch.tensor(scores.total, dtype=torch.float64).std()),
            **{f"rewards/{name}": _mean(values) for name, values in scores.parts.items() if len(scores.parts) > 1},
            "groups_without_variance": float(level.double().mean()),
            "completions/mean_length": _mean([len(found.token_ids) for found in completions]),
            "completions/cut": _mean([found.is_cut for found in completions]),
            "seconds/sampling": round(sampled - began, 4),
            "seconds/rewards": round(scored - sampled, 4),
            "seconds/updates": round(time.monotonic() - scored, 4),
        }

    def _save(self, done: int) -> Path:
        keep = self.recipe.train.keep_checkpoints
        return save_checkpoint(self.checkpoints, done, self.handle, self.updater.optimizer, self.run, keep=keep)

    def _save_interrupted(self, done: int) -> None:
        # Between two updates of one step, or inside one, the adapter is that of no step.
        if done == 0 or self.updater.is_updating or self.updater.updates != done * self.recipe.train.iterations:
            _log.warning("interrupted in the middle of an update: nothing was saved beyond the checkpoints there are")
            return
        _log.warning("interrupted after step %d; `--resume` goes on from `%s`", done, self._save(done))


def score(rewards: RewardSum, completions: Sequence[Completion]) -> Scores:
    """The rewards of completions."""
    return rewards.score([Sample(found.prompt.text, found.text, found.prompt.row) for found in completions])


def _rows(step: int, completions: Sequence[Completion], scores: Scores, count: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "line": completions[n].prompt.line,
            "prompt": completions[n].prompt.text,
            "completion": completions[n].text,
            "reward": scores.total[n],
            "rewards": {name: values[n] for name, values in scores.parts.items()},
        }
        for n in range(min(count, len(completions)))
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
