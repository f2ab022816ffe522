"""One recipe under several methods, ranks and seeds: which of them learns the data best, and how sure that is.

Each cell is a whole run of `preft.train.sft`. Its row is written when it is done, so a sweep that is stopped goes on
with the first cell that has no row.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preft.adapters.baseconfig import read_base_config
from preft.config.progress import Progress
from preft.config.schema import flat
from preft.config.train import METHODS, ResolvedRecipe, SftRecipe
from preft.data.hub import parse_dataset_name
from preft.errors import FileError, UsageError
from preft.models.locate import locate_model
from preft.train.model import ExampleScore
from preft.train.output import SCORES_NAME, write_rows
from preft.train.sft import train_sft
from preft.tuners.trainable import method_policy, planned_sites

ROWS_NAME = "rows.jsonl"
SETUP_NAME = "sweep.json"
CELLS = "cells"
_VARIED = ("output", "method", "rank", "seed", "positions", "train.learning_rate", "train.save_every")
"""Settings that a cell decides, or that decide nothing."""


@dataclass(frozen=True)
class Arm:
    """A method at a rank.

    Attributes:
        method: One of `preft.config.train.METHODS`.
        rank: Of every site.
        parameters: How many it trains.
    """

    method: str
    rank: int
    parameters: int

    @property
    def name(self) -> str:
        """Such as `lorap r8`."""
        return f"{self.method} r{self.rank}"


@dataclass(frozen=True)
class SweepSettings:
    """What is compared.

    Attributes:
        methods: Of `preft.config.train.METHODS`.
        ranks: Of every method.
        seeds: Of every arm.
        learning_rates: By method, where the recipe's is not right for it.
        match_parameters: Give each method that trains another number of parameters than the first at the same rank
            arms of its own, at the ranks at which the numbers are nearest.
        keep_adapters: Leave each cell's run in place.
    """

    methods: tuple[str, ...]
    ranks: tuple[int, ...]
    seeds: tuple[int, ...]
    learning_rates: Mapping[str, float]
    match_parameters: bool = True
    keep_adapters: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.methods, *self.learning_rates) if name not in METHODS]
        if unknown or not self.methods:
            raise UsageError(
                "The methods of the sweep are not valid",
                got=f"`{unknown[0]}`" if unknown else "none",
                accepted=", ".join(f"`{name}`" for name in METHODS),
            )
        for name, values, least in (("ranks", self.ranks, 1), ("seeds", self.seeds, 0)):
            if not values or len(set(values)) < len(values) or min(values) < least:
                raise UsageError(
                    f"The {name} of the sweep are not valid",
                    got=str(list(values)),
                    accepted=f"different integers from {least}, at least one",
                )
        wrong = [name for name, rate in self.learning_rates.items() if not 0 <= rate < float("inf")]
        if wrong:
            raise UsageError(
                f"The learning rate of `{wrong[0]}` is not valid",
                got=str(self.learning_rates[wrong[0]]),
                accepted="a number from 0",
            )


def sweep_arms(recipe: SftRecipe, settings: SweepSettings, *, progress: Progress | None = None) -> list[Arm]:
    """The arms of a sweep, by method and rank, with the number of parameters of each.

    Raises:
        UsageError: The recipe's sites do not exist.
        FileError: The model cannot be read.
    """
    folder = locate_model(recipe.model, progress=progress)
    per_rank = {method: _parameters(recipe, folder, method, 1) for method in settings.methods}
    ranks = {method: set(settings.ranks) for method in settings.methods}
    if settings.match_parameters:
        first = settings.methods[0]
        for method in settings.methods[1:]:
            ranks[method] |= {max(1, round(rank * per_rank[first] / per_rank[method])) for rank in settings.ranks}
    return [Arm(method, rank, rank * per_rank[method]) for method in settings.methods for rank in sorted(ranks[method])]


def run_sweep(
    resolved: ResolvedRecipe,
    settings: SweepSettings,
    *,
    resume: bool = False,
    argv: Sequence[str] = (),
    progress: Progress | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs the cells that have no row yet, seed by seed, so that a sweep that is stopped early compares all arms.

    Args:
        resolved: The recipe; it must have `data.eval`, and its `output` is the sweep's folder.
        settings: What is compared.
        resume: Go on in a folder that holds a sweep of the same recipe and data.
        argv: The command line, for the provenance.
        progress: Receives the stages of every run.
        on_row: Receives each new row.

    Returns:
        One row a cell; a folder may hold more, of other methods, ranks and seeds.

    Raises:
        UsageError: The recipe has no evaluation data or pushes its adapter, or the folder is taken or holds another
            sweep.
        FileError: Something cannot be read or written.
        EngineError: A loss is not finite.
    """
    recipe = resolved.recipe
    if recipe.data.eval is None:
        raise UsageError(
            "A sweep compares evaluation losses, and the recipe has no `data.eval`",
            hint="name held-out rows in the recipe, or with `--set data.eval=FILE`",
        )
    if recipe.push_to_hub is not None:
        raise UsageError(
            "A sweep pushes nothing: each of its runs would replace the last one's adapter on the hub",
            got=f"`push_to_hub` {recipe.push_to_hub}",
            hint="`--set push_to_hub=null`, then train the adapter you choose",
        )
    arms = sweep_arms(recipe, settings, progress=progress)
    output = Path(recipe.output)
    done = _open_folder(output, _setup(recipe, settings), resume=resume)
    base: list[ExampleScore] = []
    cells = [(arm, seed) for seed in settings.seeds for arm in arms]
    for arm, seed in cells:
        key = (arm.method, arm.rank, seed)
        if key not in done:
            done[key] = _run_cell(resolved, settings, arm, seed, base, argv, progress)
            # Before anything else: a row that is written is never lost.
            with (output / ROWS_NAME).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(done[key]) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            if on_row is not None:
                on_row(done[key])
    return [done[arm.method, arm.rank, seed] for arm, seed in cells]


def read_sweep(output: Path) -> list[dict[str, Any]]:
    """The rows of a sweep; a last line that was left half written is passed over.

    Raises:
        FileError: There are none.
    """
    try:
        lines = (output / ROWS_NAME).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FileError(f"`{output}` holds no sweep", got=error.strerror) from None
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise FileError(f"Line {number + 1} of `{output / ROWS_NAME}` is not a JSON object") from None
    return rows


def _run_cell(
    resolved: ResolvedRecipe,
    settings: SweepSettings,
    arm: Arm,
    seed: int,
    base: list[ExampleScore],
    argv: Sequence[str],
    progress: Progress | None,
) -> dict[str, Any]:
    """Makes one run, and its row; the first one scores the base model for all of them, into `base`."""
    recipe = resolved.recipe
    folder = Path(recipe.output) / CELLS / f"{arm.method}-r{arm.rank}-s{seed}"
    rate = settings.learning_rates.get(arm.method, recipe.train.learning_rate)
    own = replace(
        recipe,
        output=str(folder),
        method=arm.method,
        rank=arm.rank,
        seed=seed,
        positions=None if arm.method == "lora" else recipe.positions,
        orthogonal=recipe.orthogonal and arm.method in ("direftp", "mixed"),
        targets=None if arm.method == "direftp" else recipe.targets,
        train=replace(recipe.train, learning_rate=rate, save_every=None),
    )
    origins = {**resolved.origins, **dict.fromkeys((*_VARIED, "orthogonal", "targets"), "sweep")}
    made = train_sft(
        ResolvedRecipe(own, origins),
        force=True,
        draw=settings.keep_adapters,
        base_scores=base or None,
        argv=argv,
        progress=progress,
    )
    scores = [json.loads(line) for line in (folder / SCORES_NAME).read_text(encoding="utf-8").splitlines()]
    base[:] = [ExampleScore(row["id"], row["tokens"], row["base"]["loss"], row["base"]["exact"]) for row in scores]
    report = made.to_dict()
    if not settings.keep_adapters:
        shutil.rmtree(folder)
    return {
        "method": arm.method,
        "rank": arm.rank,
        "seed": seed,
        "parameters": made.parameters,
        "learning_rate": rate,
        "train_loss": report["loss"]["last"],
        "eval_loss": report["eval_loss"]["adapter"],
        "eval_exact": report["eval_exact"]["adapter"],
        "base_eval_loss": report["eval_loss"]["base"],
        "base_eval_exact": report["eval_exact"]["base"],
        "digest": report["digest"],
        "seconds": report["seconds"],
        "tokens": [score["tokens"] for score in scores],
        "losses": [round(score["adapter"]["loss"], 6) for score in scores],
        "exact": [int(score["adapter"]["exact"]) for score in scores],
    }


def _parameters(recipe: SftRecipe, folder: Path, method: str, rank: int) -> int:
    """Trainable numbers of a method, from the configuration alone."""
    import torch
    from transformers import AutoModelForCausalLM

    method_policy(method)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(read_base_config(folder))
    targets = None if method == "direftp" else recipe.targets
    sites = planned_sites(model, method, rank, targets=targets, layers=recipe.layers, alpha=recipe.alpha)
    return sum(site.num_parameters for site in sites)


def _setup(recipe: SftRecipe, settings: SweepSettings) -> dict[str, Any]:
    """What must be the same for two calls to share rows; seeds, ranks and methods may be added later."""
    fixed = {key: value for key, value in flat(recipe).items() if key not in _VARIED}
    digests = {name: _digest(getattr(recipe.data, name)) for name in ("train", "eval")}
    rates = dict.fromkeys(METHODS, recipe.train.learning_rate)
    document = {"recipe": fixed, "sha256": digests, "learning_rates": {**rates, **settings.learning_rates}}
    return json.loads(json.dumps(document))  # type: ignore[no-any-return]


def _digest(path: str) -> str | None:
    """Of a file's bytes; a data set has none before it is read."""
    if parse_dataset_name(path) is not None:
        return None
    try:
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise FileError(f"The data file `{path}` cannot be read", got=error.strerror) from None


def _open_folder(output: Path, setup: dict[str, Any], *, resume: bool) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Makes the folder, or checks that it holds a sweep of the same kind; returns the rows that are there."""
    path = output / SETUP_NAME
    if output.is_dir() and any(output.iterdir()):
        if not resume:
            raise UsageError(
                f"The output `{output}` is not empty", hint="choose another folder, or go on there with `--resume`"
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FileError(f"`{output}` holds no sweep", got=str(error)[:120]) from None
        differing = [key for key in setup if found.get(key) != setup[key]]
        if differing:
            raise UsageError(
                "The folder holds a sweep of another recipe or of other data",
                got=f"another `{differing[0]}`",
                hint="choose another folder",
            )
        rows = read_sweep(output) if (output / ROWS_NAME).is_file() else []
        # A half-written last line would be joined to the next row.
        write_rows(output / ROWS_NAME, rows)
        return {(row["method"], row["rank"], row["seed"]): row for row in rows}
    try:
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(setup, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"`{output}` cannot be written", got=error.strerror) from None
    return {}
