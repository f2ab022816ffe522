"""`preft train grpo`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preft_cli.console import Session
from preft_cli.options import Force, Json, Quiet, Verbose, examples

if TYPE_CHECKING:
    from preft.config.grpo import GrpoRecipe
    from preft.train.grpo.report import GrpoReport
    from preft.train.grpo.rollout import RolloutEngine

EPILOG = examples(
    "preft train grpo grpo-math.yaml --set data.train=mine.jsonl",
    "preft train grpo grpo-math.yaml --set method=direftp --set output=out/direftp",
    "preft train grpo grpo-math.yaml --resume",
)


def grpo(
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
    """Train on rewards: each row has a prompt and what its rewards need.

    Rows are {"prompt": TEXT or MESSAGES, ...} with further columns, such as "answer". Completions come from an engine
    in this process that the adapter is pushed into before each step. The adapter, its model card, `metrics.jsonl` with
    its curves (`curves.png`, `index.html`), `samples.jsonl` and `run.json` end up in the recipe's `output`. Ctrl-C
    saves a checkpoint first.
    """
    session = Session(as_json=as_json, quiet=quiet, verbose=verbose)
    from preft.config.grpo import load_grpo_recipe

    resolved = load_grpo_recipe(recipe, sets or ())
    for row in resolved.table():
        session.note(f"{row['key']}: {_text(row['value'])}  ({row['origin']})")
    from preft.train.grpo.run import train_grpo

    with session.diverted():
        made = train_grpo(
            resolved,
            lambda folder: _open_engine(resolved.recipe, folder, loud=verbose),
            resume=resume,
            force=force,
            argv=sys.argv,
            progress=session.progress(),
        )
    for data in made.data:
        session.note(f"{data.path}: {data.examples} prompts of {data.rows} rows, {data.tokens} tokens")
        for reason, found in data.refused.items():
            session.warn(f"{data.path}: {found.count} rows left out: {reason} ({'; '.join(found.first)})")
    for remark in made.remarks:
        session.warn(remark)
    if as_json:
        session.emit(made.to_dict())
    else:
        _show(session, made)
    if made.adapter.moves_nothing():
        session.warn("the adapter moves nothing: no group of completions had rewards that differed")


def _open_engine(recipe: GrpoRecipe, folder: Path, *, loud: bool) -> RolloutEngine:
    from preft.sdk.functions import rollout_engine
    from preft_cli.engines import require_vllm

    if recipe.rollout.engine == "vllm":
        require_vllm()
    engine: RolloutEngine = rollout_engine(recipe, folder, **({} if loud else {"use_tqdm_on_load": False}))
    return engine


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(list(value) if isinstance(value, tuple) else value)


def _show(session: Session, made: GrpoReport) -> None:
    from preft_cli.render import fields

    manifest = made.adapter.manifest
    rows: list[tuple[str, object]] = [
        ("adapter", made.folder),
        ("kind", f"{manifest.label} (positions {manifest.positions})"),
        ("sites", len(manifest.sites)),
        ("parameters", f"{made.parameters:,}"),
        ("steps", made.steps if made.resumed_from is None else f"{made.steps} (resumed from {made.resumed_from})"),
        ("reward", f"{made.reward[0]:.4f} -> {made.reward[1]:.4f}"),
    ]
    if made.evaluation is not None:
        evaluated = made.evaluation.to_dict()
        rows.append(("eval reward", f"base {evaluated['base']:.4f}, adapter {evaluated['adapter']:.4f}"))
    rows += [
        ("engine and trainer", f"|log ratio| at most {made.largest_log_ratio:.2g}"),
        ("seconds", f"{made.seconds:.1f}"),
        ("digest", manifest.digest),
    ]
    session.show(fields(rows))
