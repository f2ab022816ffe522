"""The model card of a trained adapter."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, Protocol

from preft.config.train import SftRecipe


class CardRecipe(Protocol):
    """What every recipe has and a card names."""

    @property
    def model(self) -> str:
        """The base model."""

    @property
    def output(self) -> str:
        """Folder of the run."""

    @property
    def rank(self) -> int:
        """Of every site."""

    @property
    def seed(self) -> int:
        """Of the run."""


def training_card(report: Mapping[str, Any], recipe: SftRecipe) -> str:
    """The card of a supervised run.

    Args:
        report: `SftReport.to_dict()` of the run.
        recipe: What was asked for.
    """
    evaluated = report["eval_loss"]
    return fill_card(
        "trained.md",
        report,
        recipe,
        learning_rate=f"{recipe.train.learning_rate:g}",
        batch=recipe.train.batch_size * recipe.train.accumulation,
        data=data_lines(report, "examples"),
        loss=f"{report['loss']['first']:.4f} at the first step, {report['loss']['last']:.4f} at the last",
        evaluation=""
        if evaluated is None
        else f"\nEvaluation loss: {evaluated['base']:.4f} for the base model, {evaluated['adapter']:.4f} under the "
        "adapter.\n",
    )


def fill_card(name: str, report: Mapping[str, Any], recipe: CardRecipe, **own: object) -> str:
    """Fills a card's template.

    Args:
        name: Its file below `preft_templates/cards`.
        report: The run's report as JSON.
        recipe: What was asked for.
        own: What only this kind of run has.
    """
    source = importlib.resources.files("preft_templates").joinpath("cards", name)
    return Template(source.read_text(encoding="utf-8")).substitute(
        base_yaml=json.dumps(one_line(recipe.model), ensure_ascii=False),
        base=one_line(recipe.model),
        title=one_line(Path(recipe.output).name or "adapter"),
        label=report["label"],
        num_sites=report["num_sites"],
        rank=recipe.rank,
        parameters=f"{report['parameters']:,}",
        positions=report["positions"],
        steps=report["steps"],
        seed=recipe.seed,
        digest=report["digest"],
        **own,
    )


def data_lines(report: Mapping[str, Any], unit: str) -> str:
    """One line for each file that was learnt from.

    Args:
        report: The run's report as JSON.
        unit: What its examples are called.
    """
    return "\n".join(
        f"- {one_line(Path(data['path']).name)}: {data['examples']:,} {unit} of {data['rows']:,} rows, "
        f"{data['tokens']:,} tokens (SHA-256 `{data['sha256'][:16]}`)"
        for data in report["data"]
    )


def one_line(text: str) -> str:
    """A text that cannot break out of its line."""
    return " ".join(text.split())
