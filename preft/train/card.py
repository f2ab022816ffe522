"""The model card of a trained adapter."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from preft.config.train import SftRecipe


def training_card(report: Mapping[str, Any], recipe: SftRecipe) -> str:
    """Fills the card's template.

    Args:
        report: `SftReport.to_dict()` of the run.
        recipe: What was asked for.
    """
    source = importlib.resources.files("preft_templates").joinpath("cards", "trained.md")
    evaluated = report["eval_loss"]
    return Template(source.read_text(encoding="utf-8")).substitute(
        base_yaml=json.dumps(_line(recipe.model), ensure_ascii=False),
        base=_line(recipe.model),
        title=_line(Path(recipe.output).name or "adapter"),
        label=report["label"],
        num_sites=report["num_sites"],
        rank=recipe.rank,
        parameters=f"{report['parameters']:,}",
        positions=report["positions"],
        steps=report["steps"],
        learning_rate=f"{recipe.train.learning_rate:g}",
        batch=recipe.train.batch_size * recipe.train.accumulation,
        seed=recipe.seed,
        data="\n".join(
            f"- {_line(Path(data['path']).name)}: {data['examples']:,} examples of {data['rows']:,} rows, "
            f"{data['tokens']:,} tokens (SHA-256 `{data['sha256'][:16]}`)"
            for data in report["data"]
        ),
        loss=f"{report['loss']['first']:.4f} at the first step, {report['loss']['last']:.4f} at the last",
        evaluation=""
        if evaluated is None
        else f"\nEvaluation loss: {evaluated['base']:.4f} for the base model, {evaluated['adapter']:.4f} under the "
        "adapter.\n",
        digest=report["digest"],
    )


def _line(text: str) -> str:
    """A text that cannot break out of its line."""
    return " ".join(text.split())
