"""`preft train grpo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.console import Session
from preft_cli.options import Force, Json, Quiet, Verbose, examples
from preft_cli.training import RecipeFile, Resume, Sets, note_data, note_settings

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
    recipe: RecipeFile,
    sets: Sets = None,
    resume: Resume = False,
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
    note_settings(session, resolved)
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
        note_data(session, data, "prompts")
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
