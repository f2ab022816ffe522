"""GRPO from end to end: a recipe and an engine in, an adapter with its metrics and provenance out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from preft.config.grpo import GrpoRecipe, ResolvedGrpoRecipe
from preft.config.progress import Progress, stage
from preft.config.schema import flat
from preft.data.encode import load_tokenizer
from preft.data.training import DataReport
from preft.errors import FileError
from preft.models.chat_template import chat_template_sha256
from preft.models.locate import locate_model
from preft.provenance import provenance
from preft.rewards.registry import RewardOptions, RewardSum, build_rewards
from preft.rewards.sandbox import Limits
from preft.train.grpo.checkpoint import load_checkpoint
from preft.train.grpo.loop import Loop, RowLog, score
from preft.train.grpo.probe import Probe, prove
from preft.train.grpo.prompts import PromptSet, load_prompts
from preft.train.grpo.report import Evaluation, GrpoReport, draw_grpo, grpo_card
from preft.train.grpo.rollout import OpenEngine, Sampler
from preft.train.grpo.update import Updater
from preft.train.model import DTYPES, adapter_of_recipe, load_base, turn_dropout_off
from preft.train.output import (
    CHECKPOINTS,
    METRICS_NAME,
    RUN_NAME,
    SCORES_NAME,
    place_adapter,
    prepare,
    require_output,
    write_json,
    write_rows,
)
from preft.train.trainer import read_metrics
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import extract_adapter, method_policy, trainable_parameters

SAMPLES_NAME = "samples.jsonl"
_OWN = (SAMPLES_NAME,)
_FREE = (
    "output",
    "data.eval",
    "train.eval_every",
    "train.save_every",
    "train.keep_checkpoints",
    "train.keep_samples",
    "train.ratio_tolerance",
    "rollout.engine",
    "rollout.kv_cache_gib",
)
"""Settings that may change when a run is resumed: they do not decide what is learnt."""


@dataclass(frozen=True)
class _Data:
    train: PromptSet
    eval: PromptSet | None

    @property
    def reports(self) -> tuple[DataReport, ...]:
        return tuple(found.report for found in (self.train, self.eval) if found is not None)

    @property
    def is_chat(self) -> bool:
        return any(found.is_chat for found in (self.train, self.eval) if found is not None)


def train_grpo(
    resolved: ResolvedGrpoRecipe,
    open_engine: OpenEngine,
    *,
    resume: bool = False,
    force: bool = False,
    draw: bool = True,
    argv: Sequence[str] = (),
    progress: Progress | None = None,
) -> GrpoReport:
    """Runs a recipe.

    Args:
        resolved: The recipe; see `preft.config.grpo.load_grpo_recipe`.
        open_engine: Opens the engine that samples, on the model's folder. It must hold the base in the recipe's number
            type, serve adapters of its rank, and take prompts and completions of its lengths.
        resume: Go on from the latest checkpoint in the output folder.
        force: Replace what an earlier run wrote there.
        draw: Write curves and the run's page.
        argv: The command line, for the provenance.
        progress: Receives the stages.

    Raises:
        UsageError: A setting is not valid, or the output folder is taken.
        FileError: The model or the data cannot be used, or something cannot be written.
        EngineError: Engine and trainer disagree about the policy, a reward fails, or a loss is not finite.
        KeyboardInterrupt: As raised; a checkpoint of the last complete step was written.
    """
    recipe = resolved.recipe
    method_policy(recipe.method, recipe.policy)
    output = Path(recipe.output)
    checkpoint = require_output(output, resume=resume, force=force, own=_OWN)
    rewards = _rewards(recipe)
    with closing(rewards):
        folder = locate_model(recipe.model, progress=progress)
        with stage(progress, "Reading the prompts"):
            data = _read_data(recipe, folder)
        with stage(progress, "Loading the base model"):
            handle = _handle(recipe, folder)
        with stage(progress, "Starting the engine"):
            engine = open_engine(folder)
        with closing(engine):
            prepare(output, fresh=checkpoint is None, own=_OWN)
            facts = {
                "argv": list(argv),
                "recipe": resolved.table(),
                "data": [report.to_dict() for report in data.reports],
                "engine": type(engine).__name__,
            }
            write_json(output / RUN_NAME, provenance("train", facts))
            run = _Run(recipe, handle, data, rewards, _sampler(recipe, engine), output, folder, facts, progress)
            report = run(checkpoint)
    if not draw:
        return report
    with stage(progress, "Drawing the curves"):
        remarks = draw_grpo(output, output / METRICS_NAME, report.to_dict(), resolved.table())
        return replace(report, remarks=remarks)


@dataclass(frozen=True)
class _Run:
    """A run whose parts are there."""

    recipe: GrpoRecipe
    handle: AttachedModel
    data: _Data
    rewards: RewardSum
    sampler: Sampler
    output: Path
    folder: Path
    facts: dict[str, Any]
    progress: Progress | None

    def __call__(self, checkpoint: Path | None) -> GrpoReport:
        recipe, output = self.recipe, self.output
        updater = Updater(self.handle, recipe)
        identity = {key: list(v) if isinstance(v, tuple) else v for key, v in flat(recipe).items() if key not in _FREE}
        identity["data.sha256"] = self.data.train.report.sha256
        start = 0 if checkpoint is None else load_checkpoint(checkpoint, self.handle, updater.optimizer, identity)
        updater.updates = start * recipe.train.iterations
        with stage(self.progress, "Comparing engine and trainer"):
            probe = self._prove(updater)
        loop = Loop(
            recipe=recipe,
            handle=self.handle,
            updater=updater,
            sampler=self.sampler,
            prompts=self.data.train,
            rewards=self.rewards,
            metrics=RowLog(output / METRICS_NAME, start),
            samples=RowLog(output / SAMPLES_NAME, start),
            checkpoints=output / CHECKPOINTS,
            run=identity,
            evaluate=None if self.data.eval is None else lambda: {"eval_reward": _mean(self._rewards_now())},
            progress=self.progress,
        )
        began = time.monotonic()
        with stage(self.progress, f"Training {recipe.method} at rank {recipe.rank}", recipe.train.max_steps):
            if self.progress is not None and start:
                self.progress.advance(start)
            loop(start)
        return self._finish(start if checkpoint is not None else None, probe, time.monotonic() - began)

    def _prove(self, updater: Updater) -> Probe:
        recipe = self.recipe
        prompts = self.data.train.of_step(0, recipe.rollout.prompts, recipe.seed)
        return prove(self.handle, updater, self.sampler, prompts, tolerance=recipe.ratio_tolerance, seed=recipe.seed)

    def _rewards_of(self, *, base: bool) -> tuple[float, ...]:
        """Rewards of the evaluation prompts, under the policy pushed last or the base model."""
        prompts = self.data.eval.prompts if self.data.eval is not None else ()
        return score(self.rewards, self.sampler.greedy(prompts, base=base)).total

    def _rewards_now(self) -> tuple[float, ...]:
        self.sampler.push(extract_adapter(self.handle))
        return self._rewards_of(base=False)

    def _finish(self, resumed: int | None, probe: Probe, seconds: float) -> GrpoReport:
        """Evaluates, writes the adapter, and reports."""
        recipe, output = self.recipe, self.output
        evaluation = None
        if self.data.eval is not None:
            # Here and not at the start, so that a run that is resumed does it once.
            with stage(self.progress, "Evaluating the base model"):
                base = self._rewards_of(base=True)
            with stage(self.progress, "Evaluating the adapter"):
                evaluation = Evaluation(base, self._rewards_now())
            _write_evaluation(output / SCORES_NAME, self.data.eval, evaluation)
        rows = [row for row in read_metrics(output / METRICS_NAME) if "reward" in row]
        facts = {**self.facts, "steps": recipe.train.max_steps, "reward": [rows[0]["reward"], rows[-1]["reward"]]}
        if evaluation is not None:
            facts["eval_reward"] = evaluation.to_dict()
        document = provenance("train", facts)
        adapter = extract_adapter(
            self.handle,
            dtype=DTYPES[recipe.adapter_dtype],
            provenance=document,
            chat_template_sha256=chat_template_sha256(self.folder) if self.data.is_chat else None,
        )
        report = GrpoReport(
            adapter=adapter,
            folder=output,
            steps=recipe.train.max_steps,
            resumed_from=resumed,
            parameters=sum(parameter.numel() for parameter in trainable_parameters(self.handle).values()),
            reward=(rows[0]["reward"], rows[-1]["reward"]),
            evaluation=evaluation,
            probe=probe,
            largest_log_ratio=max(row["ratio/max_abs_log"] for row in rows),
            data=self.data.reports,
            seconds=seconds,
        )
        with stage(self.progress, "Writing the adapter"):
            write_json(output / RUN_NAME, document)
            place_adapter(adapter, output, readme=grpo_card(report.to_dict(), recipe))
        return report


def _rewards(recipe: GrpoRecipe) -> RewardSum:
    settings = recipe.reward
    options = RewardOptions(
        pattern=settings.pattern,
        tags=settings.tags,
        run_code=settings.run_code,
        limits=Limits(wall_s=settings.code_seconds, memory_bytes=settings.code_memory_mib << 20),
        path=settings.path,
    )
    return build_rewards(settings.functions, settings.weights, options)


def _read_data(recipe: GrpoRecipe, folder: Path) -> _Data:
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise FileError(f"The model in `{folder}` has no tokenizer", hint="put its tokenizer files into the folder")
    settings = recipe.data
    found = [
        load_prompts(path, tokenizer, max_tokens=settings.max_prompt_tokens, max_bad_rows=settings.max_bad_rows)
        for path in (settings.train, settings.eval)
        if path is not None
    ]
    return _Data(found[0], found[1] if len(found) > 1 else None)


def _handle(recipe: GrpoRecipe, folder: Path) -> AttachedModel:
    model = load_base(folder, dtype=recipe.train.base_dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    handle = adapter_of_recipe(model, folder, recipe)
    # The policy that learns is the one that was sampled, so nothing of the base is dropped. Only the recomputation of
    # activations asks for a model in training.
    turn_dropout_off(model)
    model.train(recipe.train.gradient_checkpointing)
    if recipe.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return handle


def _sampler(recipe: GrpoRecipe, engine: Any) -> Sampler:
    settings = recipe.rollout
    return Sampler(engine, max_tokens=settings.max_tokens, temperature=settings.temperature, seed=recipe.seed)


def _write_evaluation(path: Path, prompts: PromptSet, evaluation: Evaluation) -> None:
    rows = zip(prompts.prompts, evaluation.base, evaluation.adapter, strict=True)
    write_rows(path, ({"line": prompt.line, "base": base, "adapter": adapter} for prompt, base, adapter in rows))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
