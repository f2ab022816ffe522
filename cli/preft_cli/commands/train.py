"""`preft train`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preft_cli.console import Session
from preft_cli.options import Force, Json, Quiet, Verbose, command_app, examples

if TYPE_CHECKING:
    from preft.config.train import ResolvedRecipe
    from preft.data.training import DataReport
    from preft.train.sft import SftReport

app = command_app()


@app.callback()
def train() -> None:
    """Train an adapter under the rule that serves it: on prompt tokens only, with the boundary exact."""


@app.command(
    "sft",
    epilog=examples(
        "preft train sft sft-lorap.yaml --set data.train=mine.jsonl",
        "preft train sft sft-direftp.yaml --set rank=16 --set output=out/rank16",
        "preft train sft sft-lorap.yaml --resume",
    ),
)
def sft(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file; `preft init DIR` writes some.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as `train.max_steps=50`; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in the output.")] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train on prompts and completions: rows of {"messages": [...]} or {"prompt", "completion"}.

    The adapter, its model card, `metrics.jsonl` with its curves (`curves.png`, `index.html`) and `run.json` (every
    setting with its origin, versions, digests of the data) end up in the recipe's `output`.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.config.train import load_sft_recipe

    resolved = load_sft_recipe(recipe, sets or ())
    _note_settings(session, resolved)
    from preft.train.sft import train_sft

    with session.diverted():
        made = train_sft(resolved, resume=resume, force=force, argv=sys.argv, progress=session.progress())
    for data in made.data:
        _note_data(session, data)
    if as_json:
        session.emit(made.to_dict())
    else:
        _show(session, made)
    for remark in made.remarks:
        session.warn(remark)
    if made.adapter.moves_nothing():
        session.warn("the adapter moves nothing; train it for longer, or at a higher learning rate")


def _note_settings(session: Session, resolved: ResolvedRecipe) -> None:
    for row in resolved.table():
        value = row["value"]
        text = value if isinstance(value, str) else json.dumps(list(value) if isinstance(value, tuple) else value)
        session.note(f"{row['key']}: {text}  ({row['origin']})")


def _note_data(session: Session, data: DataReport) -> None:
    session.note(f"{data.path}: {data.examples} examples of {data.rows} rows, {data.tokens} tokens")
    if data.prompts_cut:
        session.note(f"note: {data.prompts_cut} prompts lost their first tokens to `data.max_tokens`")
    if data.completions_cut:
        session.note(f"note: {data.completions_cut} completions were cut to `data.max_tokens`, without an end")
    for reason, found in data.refused.items():
        session.warn(f"{data.path}: {found.count} rows left out: {reason} ({'; '.join(found.first)})")


def _show(session: Session, made: SftReport) -> None:
    from preft_cli.render import fields

    manifest = made.adapter.manifest
    rows: list[tuple[str, object]] = [
        ("adapter", made.folder),
        ("kind", f"{manifest.label} (positions {manifest.positions})"),
        ("sites", len(manifest.sites)),
        ("parameters", f"{made.parameters:,}"),
        ("steps", made.steps if made.resumed_from is None else f"{made.steps} (resumed from {made.resumed_from})"),
        ("loss", f"{made.loss[0]:.4f} -> {made.loss[1]:.4f}"),
    ]
    if made.eval_loss is not None:
        rows.append(("eval loss", f"base {made.eval_loss[0]:.4f}, adapter {made.eval_loss[1]:.4f}"))
    if made.eval_exact is not None:
        rows.append(("exact", f"base {made.eval_exact[0]:.1%}, adapter {made.eval_exact[1]:.1%} of the completions"))
    rows += [("seconds", f"{made.seconds:.1f}"), ("digest", manifest.digest)]
    session.show(fields(rows))
