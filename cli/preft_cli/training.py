"""What the training commands take and say alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preft_cli.console import Session

if TYPE_CHECKING:
    from preft.config.schema import Resolved
    from preft.data.training import DataReport

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file; `preft init DIR` writes some.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as `train.max_steps=50`; repeatable."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in the output.")]


def note_settings(session: Session, resolved: Resolved[Any]) -> None:
    """Notes every setting with where it came from."""
    for row in resolved.table():
        value = row["value"]
        text = value if isinstance(value, str) else json.dumps(list(value) if isinstance(value, tuple) else value)
        session.note(f"{row['key']}: {text}  ({row['origin']})")


def note_data(session: Session, data: DataReport, unit: str) -> None:
    """Notes what became of a file's rows.

    Args:
        session: Where output goes.
        data: The file.
        unit: What its examples are called.
    """
    session.note(f"{data.path}: {data.examples} {unit} of {data.rows} rows, {data.tokens} tokens")
    if data.prompts_cut:
        session.note(f"note: {data.prompts_cut} prompts lost their first tokens to `data.max_tokens`")
    if data.completions_cut:
        session.note(f"note: {data.completions_cut} completions were cut to `data.max_tokens`, without an end")
    for reason, found in data.refused.items():
        session.warn(f"{data.path}: {found.count} rows left out: {reason} ({'; '.join(found.first)})")
