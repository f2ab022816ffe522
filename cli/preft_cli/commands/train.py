"""`preft train`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preft_cli.commands.train_grpo import EPILOG as GRPO_EPILOG
from preft_cli.commands.train_grpo import grpo
from preft_cli.console import Session
from preft_cli.options import Force, Json, Quiet, Verbose, command_app, examples
from preft_cli.training import RecipeFile, Resume, Sets, note_data, note_settings

if TYPE_CHECKING:
    from preft.train.sft import SftReport

app = command_app()
app.command("grpo", epilog=GRPO_EPILOG)(grpo)


@app.callback()
def train() -> None:
    """Train an adapter under the rule that serves it."""


@app.command(
    "sft",
    epilog=examples(
        "preft train sft sft-lorap.yaml --set data.train=mine.jsonl",
        "preft train sft sft-direftp.yaml --set rank=16 --set output=out/rank16",
        "preft train sft sft-lorap.yaml --resume",
        "torchrun --nproc-per-node 4 -m preft_cli train sft sft-lorap.yaml",
    ),
)
def sft(
    recipe: RecipeFile,
    sets: Sets = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train on prompts and completions, or on conversations.

    Rows are {"messages": [...]} or {"prompt", "completion"}. The adapter, its model card, `metrics.jsonl` with its
    curves (`curves.png`, `index.html`), `eval.jsonl` where the recipe has `data.eval`, and `run.json` (every setting
    with its origin, versions, digests of the data) end up in the recipe's `output`.
    """
    from preft.train.processes import is_main_process

    speaks = is_main_process()
    session = Session(as_json=as_json, quiet=quiet or not speaks, verbose=verbose)
    from preft.config.train import load_sft_recipe

    resolved = load_sft_recipe(recipe, sets or ())
    note_settings(session, resolved)
    from preft.train.sft import train_sft

    with session.diverted():
        made = train_sft(resolved, resume=resume, force=force, argv=sys.argv, progress=session.progress())
    if not speaks:
        return
    for data in made.data:
        note_data(session, data, "examples")
    if as_json:
        session.emit(made.to_dict())
    else:
        _show(session, made)
        session.note(f"next: preft check {made.folder} --base {resolved.recipe.model}")
    for remark in made.remarks:
        session.warn(remark)
    if made.adapter.moves_nothing():
        session.warn("the adapter moves nothing; train it for longer, or at a higher learning rate")


@app.command(
    "sweep",
    epilog=examples(
        "preft train sweep sft-lorap.yaml --set data.eval=held-out.jsonl --set output=out/sweep --ranks 2,8,32",
        "preft train sweep sft-lorap.yaml --set data.eval=held-out.jsonl --rate direftp=4e-3 --seeds 0,1,2 --resume",
    ),
)
def sweep(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML file with `data.eval`; `output` is the sweep's.")
    ],
    sets: Sets = None,
    methods: Annotated[
        str, typer.Option("--methods", metavar="M,...", help="Compared; the first is what others are held against.")
    ] = "lora,lorap,direftp",
    ranks: Annotated[str, typer.Option("--ranks", metavar="R,...", help="Of every method.")] = "2,8,32",
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,...", help="Of every arm.")] = "0,1,2",
    rates: Annotated[
        list[str] | None,
        typer.Option("--rate", metavar="METHOD=RATE", help="A method's own learning rate; repeatable."),
    ] = None,
    match_parameters: Annotated[
        bool,
        typer.Option(
            "--match-parameters/--no-match-parameters",
            help="Add ranks at which the other methods train as many parameters as the first.",
        ),
    ] = True,
    keep_adapters: Annotated[bool, typer.Option("--keep-adapters", help="Keep every run, not its row alone.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the cells that have no row yet.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare methods over ranks and seeds on one recipe, with intervals.

    It compares the loss on `data.eval` and the part of its completions that greedy decoding gives exactly. A row is
    written after every run, so a sweep that is stopped goes on with `--resume`. The output holds `rows.jsonl`,
    `summary.json`, `sweep.png` and `index.html`.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.config.train import load_sft_recipe

    resolved = load_sft_recipe(recipe, sets or ())
    from preft.errors import UnsupportedError
    from preft.train.sweep import SETUP_NAME, SweepSettings, run_sweep
    from preft.train.sweep_report import arm_cells, difference_cells, remarks_of, save_sweep, summarise

    settings = SweepSettings(
        methods=tuple(_parts(methods)),
        ranks=_integers("--ranks", ranks),
        seeds=_integers("--seeds", seeds),
        learning_rates=dict(_rate(text) for text in rates or ()),
        match_parameters=match_parameters,
        keep_adapters=keep_adapters,
    )

    def note(row: dict[str, Any]) -> None:
        session.note(
            f"{row['method']} r{row['rank']}, seed {row['seed']}: eval loss {row['eval_loss']:.4f}, "
            f"exact {row['eval_exact']:.1%}, {row['seconds']:.0f} s"
        )

    with session.diverted():
        rows = run_sweep(resolved, settings, resume=resume, argv=sys.argv, progress=session.progress(), on_row=note)
    output = Path(resolved.recipe.output)
    try:
        summary = save_sweep(output, rows, json.loads((output / SETUP_NAME).read_text(encoding="utf-8")))
    except UnsupportedError as error:
        session.warn(f"nothing was drawn: {error.what} ({error.hint})")
        summary = summarise(rows)
    for remark in remarks_of(summary):
        session.warn(remark)
    if as_json:
        session.emit({"folder": str(output), "cells": len(rows), **summary})
        return
    from preft_cli.render import table

    shown = [
        [cells(entry) for entry in summary[key]]
        for key, cells in (("arms", arm_cells), ("differences", difference_cells))
    ]
    session.show(*(table(list(part[0]), [list(row.values()) for row in part]) for part in shown if part))
    session.note(f"page: {output / 'index.html'}")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(option: str, text: str) -> tuple[int, ...]:
    from preft.errors import UsageError

    try:
        return tuple(int(part) for part in _parts(text))
    except ValueError:
        raise UsageError(f"`{option}` is not valid", got=f"`{text}`", accepted="integers, such as `2,8,32`") from None


def _rate(text: str) -> tuple[str, float]:
    from preft.errors import UsageError

    method, _, value = text.partition("=")
    try:
        return method.strip(), float(value)
    except ValueError:
        raise UsageError("`--rate` is not valid", got=f"`{text}`", accepted="such as `direftp=4e-3`") from None


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
    if made.pushed is not None:
        rows.append(("pushed", made.pushed))
    if (made.folder / "index.html").is_file():
        rows.append(("page", made.folder / "index.html"))
    rows += [("seconds", f"{made.seconds:.1f}"), ("digest", manifest.digest)]
    session.show(fields(rows))
