"""Supervised training from end to end: a recipe in, an adapter with its metrics and provenance out."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preft.adapters.adapter import Adapter
from preft.adapters.baseconfig import read_base_config
from preft.config.progress import Progress, stage
from preft.config.schema import flat
from preft.config.train import ResolvedRecipe, SftRecipe
from preft.data.chat import ChatEncoder, end_ids
from preft.data.encode import load_tokenizer
from preft.data.examples import Limits
from preft.data.training import DataReport, ExampleSet, load_examples
from preft.errors import FileError, UnsupportedError, UsageError
from preft.models.locate import locate_model
from preft.provenance import provenance
from preft.train.card import training_card
from preft.train.curves import inline_curves, save_curves
from preft.train.model import DTYPES, ExampleScore, adapter_of_recipe, load_base, score_examples, token_loss
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
from preft.train.page import save_page
from preft.train.processes import Processes
from preft.train.push import push_adapter
from preft.train.trainer import AdapterTrainer, MetricsWriter, read_metrics
from preft.tuners.attach import AttachedModel
from preft.tuners.trainable import extract_adapter, method_policy, trainable_parameters

_FREE = (
    "output", "train.eval_every", "train.save_every", "train.keep_checkpoints", "train.report_to", "data.eval",
    "push_to_hub", "push_private",
)  # fmt: skip
"""Settings that may change when a run is resumed: they do not decide its losses."""


@dataclass(frozen=True)
class SftReport:
    """What a run did.

    Attributes:
        adapter: What it made.
        folder: Where it lies.
        steps: Updates made, those of a resumed run included.
        resumed_from: Step of the checkpoint that the run went on from, or None.
        parameters: How many were trained.
        loss: First and last step's.
        eval_loss: Of the base model and of the adapter, or None without evaluation data.
        eval_exact: Part of the evaluation examples whose completion each of them gives exactly, or None.
        data: What became of the files' rows.
        seconds: Time the steps of this call took.
        remarks: What a user should be told.
        pushed: Address of the commit on the hub, or None.
    """

    adapter: Adapter
    folder: Path
    steps: int
    resumed_from: int | None
    parameters: int
    loss: tuple[float, float]
    eval_loss: tuple[float, float] | None
    eval_exact: tuple[float, float] | None
    data: tuple[DataReport, ...]
    seconds: float
    remarks: tuple[str, ...] = ()
    pushed: str | None = None

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
            "loss": {"first": self.loss[0], "last": self.loss[1]},
            "eval_loss": _by_arm(self.eval_loss),
            "eval_exact": _by_arm(self.eval_exact),
            "data": [report.to_dict() for report in self.data],
            "seconds": round(self.seconds, 3),
            "remarks": list(self.remarks),
            "pushed": self.pushed,
        }


@dataclass(frozen=True)
class _Data:
    train: ExampleSet
    eval: ExampleSet | None
    reports: tuple[DataReport, ...]
    template_sha256: str | None


def train_sft(
    resolved: ResolvedRecipe,
    *,
    resume: bool = False,
    force: bool = False,
    draw: bool = True,
    base_scores: Sequence[ExampleScore] | None = None,
    argv: Sequence[str] = (),
    progress: Progress | None = None,
) -> SftReport:
    """Runs a recipe; under `torchrun`, in all its processes together, of which the first one writes.

    Args:
        resolved: The recipe; see `preft.config.train.load_sft_recipe`.
        resume: Go on from the latest checkpoint in the output folder.
        force: Replace what an earlier run wrote there.
        draw: Write curves and the run's page.
        base_scores: Of the evaluation examples under the base model, where they are known from another run.
        argv: The command line, for the provenance.
        progress: Receives the stages.

    Raises:
        UsageError: A setting is not valid, or the output folder is taken.
        FileError: The model or the data cannot be used, or something cannot be written.
        EngineError: The loss is not finite; the message names the step and the examples.
    """
    recipe = resolved.recipe
    method_policy(recipe.method, recipe.policy)  # refuses a contradiction before any work
    output = Path(recipe.output)
    processes = Processes()
    _require_reporters(recipe.train.report_to)
    checkpoint = require_output(output, resume=resume, force=force)
    with processes.main_first():
        folder = locate_model(recipe.model, progress=progress)
    with stage(progress, "Reading the data"):
        data = _read_data(recipe, folder)
    with stage(progress, "Loading the base model"):
        model = load_base(folder, dtype=recipe.train.base_dtype, quantisation=recipe.train.quantisation)
        handle = adapter_of_recipe(model, folder, recipe)
    # Nobody writes before everybody has looked, and nobody goes on before the folder is ready.
    processes.wait()
    if processes.is_main:
        prepare(output, fresh=checkpoint is None)
    facts = {
        "argv": list(argv),
        "recipe": resolved.table(),
        "data": [report.to_dict() for report in data.reports],
        "eos_policy": "a completion ends with its end-of-turn token; where it had none, the end of sequence is added",
    }
    if processes.is_main:
        write_json(output / RUN_NAME, provenance("train", facts))
    processes.wait()
    trainer = _trainer(recipe, handle, data, output, progress)
    if data.eval is not None and base_scores is None:
        with stage(progress, "Evaluating the base model"):
            handle.use(None)
            base_scores = score_examples(model, data.eval, policy=None, batch_size=recipe.train.batch_size)
            handle.use("default")
    started = time.monotonic()
    with stage(progress, f"Training {recipe.method} at rank {recipe.rank}", recipe.train.max_steps):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    done = int(trainer.state.global_step), time.monotonic() - started
    report = _finish(
        recipe, handle, data, facts, list(base_scores or ()), checkpoint, done, progress, write=processes.is_main
    )
    return _show_and_push(resolved, report, draw=draw, progress=progress) if processes.is_main else report


def _show_and_push(resolved: ResolvedRecipe, report: SftReport, *, draw: bool, progress: Progress | None) -> SftReport:
    """What follows once the adapter is safe: its curves, and the hub."""
    recipe, output = resolved.recipe, report.folder
    remarks: tuple[str, ...] = ()
    if recipe.train.quantisation is not None:
        remarks += (f"trained over a base in {recipe.train.quantisation}: `preft check` it on the base you serve",)
    if draw:
        with stage(progress, "Drawing the curves"):
            remarks += draw_run(output, report.to_dict(), resolved.table())
    pushed = None
    if recipe.push_to_hub is not None:
        with stage(progress, f"Pushing to {recipe.push_to_hub}"):
            pushed = push_adapter(output, recipe.push_to_hub, private=recipe.push_private)
    return replace(report, remarks=remarks, pushed=pushed)


def _read_data(recipe: SftRecipe, folder: Path) -> _Data:
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise FileError(f"The model in `{folder}` has no tokenizer", hint="put its tokenizer files into the folder")
    encoder = ChatEncoder(tokenizer, end_ids=_end_ids(folder))
    longest = getattr(read_base_config(folder).get_text_config(), "max_position_embeddings", None)
    settings = recipe.data
    if longest is not None and settings.max_tokens > longest:
        raise UsageError(
            "`data.max_tokens` is longer than the model's context", got=str(settings.max_tokens), accepted=str(longest)
        )
    limits = Limits(settings.max_tokens, cut_completions=settings.cut_completions)
    found = [
        load_examples(
            path,
            encoder,
            limits,
            turns=settings.turns,
            max_bad_rows=settings.max_bad_rows,
            columns=settings.column_names,
        )
        for path in (settings.train, settings.eval)
        if path is not None
    ]
    reports = tuple(report for _, report in found)
    is_chat = any(report.schema == "messages" for report in reports)
    template = encoder.template_sha256 if is_chat else None
    return _Data(found[0][0], found[1][0] if len(found) > 1 else None, reports, template)


def _end_ids(folder: Path) -> frozenset[int]:
    from transformers import GenerationConfig

    ends = end_ids(read_base_config(folder))
    if (folder / "generation_config.json").is_file():
        ends |= end_ids(GenerationConfig.from_pretrained(folder))
    return ends


def _trainer(
    recipe: SftRecipe, handle: AttachedModel, data: _Data, output: Path, progress: Progress | None
) -> AdapterTrainer:
    """The trainer, which also moves the model to its device."""
    if recipe.train.gradient_checkpointing:
        handle.model.enable_input_require_grads()
    run = {key: _plain(value) for key, value in flat(recipe).items() if key not in _FREE}
    run["data.sha256"] = data.reports[0].sha256
    return AdapterTrainer(
        handle,
        data.train,
        data.eval,
        recipe.train,
        output / CHECKPOINTS,
        seed=recipe.seed,
        run=run,
        callbacks=[MetricsWriter(output / METRICS_NAME, progress)],
    )


def _finish(
    recipe: SftRecipe,
    handle: AttachedModel,
    data: _Data,
    facts: dict[str, Any],
    base_scores: list[ExampleScore],
    checkpoint: Path | None,
    done: tuple[int, float],
    progress: Progress | None,
    *,
    write: bool,
) -> SftReport:
    """Evaluates, writes the adapter, and reports."""
    output = Path(recipe.output)
    steps, seconds = done
    eval_loss = eval_exact = None
    if data.eval is not None:
        with stage(progress, "Evaluating the adapter"):
            policy = handle.policies["default"]
            scores = score_examples(handle.model, data.eval, policy=policy, batch_size=recipe.train.batch_size)
        arms = {"base": base_scores, "adapter": scores}
        if write:
            _write_scores(output / SCORES_NAME, arms)
        eval_loss = token_loss(base_scores), token_loss(scores)
        eval_exact = _part_exact(base_scores), _part_exact(scores)
    rows = [row["loss"] for row in read_metrics(output / METRICS_NAME) if "loss" in row]
    losses = (rows[0], rows[-1]) if rows else (math.nan, math.nan)
    facts = {**facts, "steps": steps, "loss": {"first": losses[0], "last": losses[1]}}
    if eval_loss is not None:
        facts["eval_loss"], facts["eval_exact"] = _by_arm(eval_loss), _by_arm(eval_exact)
    document = provenance("train", facts)
    adapter = extract_adapter(
        handle,
        dtype=DTYPES[recipe.adapter_dtype],
        provenance=document,
        chat_template_sha256=data.template_sha256,
    )
    report = SftReport(
        adapter=adapter,
        folder=output,
        steps=steps,
        resumed_from=None if checkpoint is None else int(checkpoint.name.rpartition("-")[2]),
        parameters=sum(parameter.numel() for parameter in trainable_parameters(handle).values()),
        loss=losses,
        eval_loss=eval_loss,
        eval_exact=eval_exact,
        data=data.reports,
        seconds=seconds,
    )
    if not write:
        return report
    with stage(progress, "Writing the adapter"):
        write_json(output / RUN_NAME, document)
        place_adapter(adapter, output, readme=training_card(report.to_dict(), recipe))
    return report


def draw_run(output: Path, report: dict[str, Any], settings: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Writes the curves and the page of a finished run; returns why not, where matplotlib is missing.

    Args:
        output: The run's folder, with its metrics.
        report: `SftReport.to_dict()`.
        settings: `ResolvedRecipe.table()`.
    """
    rows = read_metrics(output / METRICS_NAME)
    evaluated = report["eval_loss"]
    baselines = {} if evaluated is None else {"eval_loss": evaluated["base"]}
    summary = {
        "adapter": f"{report['label']} (positions {report['positions']}), {report['num_sites']} sites, "
        f"{report['parameters']:,} parameters",
        "base model": report["base"],
        "steps": report["steps"],
        "loss": f"{report['loss']['first']:.4f} -> {report['loss']['last']:.4f}",
        "digest": report["digest"],
    }
    if evaluated is not None:
        exact = report["eval_exact"]
        summary["evaluation loss"] = f"base {evaluated['base']:.4f}, adapter {evaluated['adapter']:.4f}"
        summary["exact completions"] = f"base {exact['base']:.1%}, adapter {exact['adapter']:.1%}"
    tables = [("Data", [_data_row(data) for data in report["data"]]), ("Settings", settings)]
    try:
        save_curves(rows, output, baselines=baselines)
        title = f"Training run {output.resolve().name}"
        pictures = inline_curves(rows, baselines=baselines)
        save_page(output, title, pictures, summary=summary, tables=tables)
    except UnsupportedError as error:
        return (f"no curves were drawn: {error.what} ({error.hint})",)
    return ()


def _data_row(data: dict[str, Any]) -> dict[str, Any]:
    refused = {reason: found["count"] for reason, found in data["refused"].items()}
    names = ("path", "rows", "examples", "tokens", "prompts_cut", "completions_cut")
    return {**{name.replace("_", " "): data[name] for name in names}, "refused": refused or "none"}


def _part_exact(scores: Sequence[ExampleScore]) -> float:
    return sum(score.is_exact for score in scores) / len(scores)


def _by_arm(pair: tuple[float, float] | None) -> dict[str, float] | None:
    return None if pair is None else {"base": pair[0], "adapter": pair[1]}


def _write_scores(path: Path, arms: Mapping[str, Sequence[ExampleScore]]) -> None:
    """One row an evaluation example, with each arm's loss."""
    rows = []
    for base, own in zip(arms["base"], arms["adapter"], strict=True):
        found = {"base": base, "adapter": own}
        row = {"id": own.id, "tokens": own.tokens}
        rows.append({**row, **{name: {"loss": arm.loss, "exact": arm.is_exact} for name, arm in found.items()}})
    write_rows(path, rows)


def _require_reporters(names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"`train.report_to` names `{missing[0]}`, which is not installed", hint=f"pip install {missing[0]}"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
