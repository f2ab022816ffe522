"""What a run of GRPO reports and leaves: its numbers, model card, curves and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.adapters.adapter import Adapter
from preft.config.grpo import GrpoRecipe
from preft.data.training import DataReport
from preft.errors import UnsupportedError
from preft.train.card import data_lines, fill_card, one_line
from preft.train.curves import inline_curves, save_curves
from preft.train.grpo.probe import Probe
from preft.train.page import save_page
from preft.train.trainer import read_metrics


@dataclass(frozen=True)
class Evaluation:
    """Rewards of greedy completions of the evaluation prompts, in their order.

    Attributes:
        base: Of the base model.
        adapter: Of the trained adapter.
    """

    base: tuple[float, ...]
    adapter: tuple[float, ...]

    def to_dict(self) -> dict[str, float]:
        """Means."""
        return {"base": sum(self.base) / len(self.base), "adapter": sum(self.adapter) / len(self.adapter)}


@dataclass(frozen=True)
class GrpoReport:
    """What a run did.

    Attributes:
        adapter: What it made.
        folder: Where it lies.
        steps: Steps taken, those of a resumed run included.
        resumed_from: Step of the checkpoint that the run went on from, or None.
        parameters: How many were trained.
        reward: Mean of the first and of the last step.
        evaluation: Or None without evaluation data.
        probe: How engine and trainer agreed before the first step.
        largest_log_ratio: Largest |log ratio| of a token between them over all steps, in nats.
        data: What became of the files' rows.
        seconds: Time the steps of this call took.
        remarks: What was not done, and why.
    """

    adapter: Adapter
    folder: Path
    steps: int
    resumed_from: int | None
    parameters: int
    reward: tuple[float, float]
    evaluation: Evaluation | None
    probe: Probe
    largest_log_ratio: float
    data: tuple[DataReport, ...]
    seconds: float
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        manifest = self.adapter.manifest
        return {
            "folder": str(self.folder),
            "label": manifest.label,
            "positions": str(manifest.positions),
            "base": manifest.base.model,
            "digest": manifest.digest,
            "num_sites": len(manifest.sites),
            "parameters": self.parameters,
            "steps": self.steps,
            "resumed_from": self.resumed_from,
            "reward": {"first": self.reward[0], "last": self.reward[1]},
            "eval_reward": None if self.evaluation is None else self.evaluation.to_dict(),
            "probe": {"max_abs_log_ratio": self.probe.largest, "felt": self.probe.felt},
            "max_abs_log_ratio": self.largest_log_ratio,
            "data": [report.to_dict() for report in self.data],
            "seconds": round(self.seconds, 3),
            "remarks": list(self.remarks),
        }


def grpo_card(report: Mapping[str, Any], recipe: GrpoRecipe) -> str:
    """The card of a run on rewards.

    Args:
        report: `GrpoReport.to_dict()`.
        recipe: What was asked for.
    """
    evaluated = report["eval_reward"]
    return fill_card(
        "trained-grpo.md",
        report,
        recipe,
        learning_rate=f"{recipe.train.learning_rate:g}",
        prompts=recipe.rollout.prompts,
        group=recipe.rollout.group_size,
        max_tokens=recipe.rollout.max_tokens,
        rewards=", ".join(f"`{one_line(name)}`" for name in recipe.reward.functions),
        loss=recipe.train.loss,
        beta=f"{recipe.train.beta:g}",
        data=data_lines(report, "prompts"),
        reward=f"{report['reward']['first']:.4f} at the first step, {report['reward']['last']:.4f} at the last",
        evaluation=""
        if evaluated is None
        else f"\nReward of greedy completions of the evaluation prompts: {evaluated['base']:.4f} for the base model, "
        f"{evaluated['adapter']:.4f} under the adapter.\n",
    )


def draw_grpo(output: Path, metrics: Path, report: Mapping[str, Any], settings: Sequence[Any]) -> tuple[str, ...]:
    """Writes the curves and the page of a finished run; returns why not, where matplotlib is missing.

    Args:
        output: The run's folder.
        metrics: Its metrics.
        report: `GrpoReport.to_dict()`.
        settings: `ResolvedGrpoRecipe.table()`.
    """
    rows = read_metrics(metrics)
    evaluated = report["eval_reward"]
    baselines = {} if evaluated is None else {"eval_reward": evaluated["base"]}
    summary = {
        "adapter": f"{report['label']} (positions {report['positions']}), {report['num_sites']} sites, "
        f"{report['parameters']:,} parameters",
        "base model": report["base"],
        "steps": report["steps"],
        "reward": f"{report['reward']['first']:.4f} -> {report['reward']['last']:.4f}",
        "largest |log ratio| of engine and trainer": f"{report['max_abs_log_ratio']:.2g}",
        "digest": report["digest"],
    }
    if evaluated is not None:
        summary["evaluation reward"] = f"base {evaluated['base']:.4f}, adapter {evaluated['adapter']:.4f}"
    data = [
        {"path": row["path"], "rows": row["rows"], "prompts": row["examples"], "tokens": row["tokens"]}
        for row in report["data"]
    ]
    try:
        save_curves(rows, output, baselines=baselines)
        pictures = inline_curves(rows, baselines=baselines)
        title = f"Training run {output.resolve().name}"
        save_page(output, title, pictures, summary=summary, tables=[("Data", data), ("Settings", settings)])
    except UnsupportedError as error:
        return (f"no curves were drawn: {error.what} ({error.hint})",)
    return ()
