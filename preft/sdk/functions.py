"""One function for each command of the command line, with its options as arguments."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from preft.config.schema import Layer
from preft.config.train import recipe_layers, resolve_sft_recipe
from preft.errors import UsageError
from preft.sdk.progress import default_progress
from preft.sdk.reports import BenchReport, EvaluationReport, PlanReport, TrainingRun

if TYPE_CHECKING:
    from preft.config.grpo import GrpoRecipe

Spec = TypeVar("Spec")


def train_sft(
    recipe: Path | str | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool | None = None,
    **keys: Any,
) -> TrainingRun:
    """Trains an adapter under the rule that serves it.

    Args:
        recipe: A recipe's file, or None to give every key here.
        resume: Go on from the latest checkpoint in the output folder.
        force: Replace what an earlier run wrote there.
        progress: Show progress; None shows it in notebooks and terminals.
        keys: Keys of the recipe, stronger than the file's; sections as mappings: `train={"max_steps": 30}`.

    Raises:
        PreftError: See `preft.train.sft.train_sft`.

    Example:
        >>> run = train_sft(model="smollm2-135m-instruct", method="lorap", rank=8, output="out/mine",
        ...                 data={"train": "rows.jsonl"},
        ...                 train={"max_steps": 30, "learning_rate": 2e-3, "batch_size": 8})
        >>> run.plot()
    """
    from preft.train.sft import train_sft as run

    resolved = resolve_sft_recipe(_layers(recipe, keys))
    report = run(resolved, resume=resume, force=force, progress=default_progress(progress))
    return TrainingRun(report.folder, report.adapter, report.to_dict())


def train_grpo(
    recipe: Path | str | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool | None = None,
    **keys: Any,
) -> TrainingRun:
    """Trains an adapter on rewards; completions come from an engine that it is pushed into before each step.

    Args:
        recipe: A recipe's file, or None to give every key here.
        resume: Go on from the latest checkpoint in the output folder.
        force: Replace what an earlier run wrote there.
        progress: Show progress; None shows it in notebooks and terminals.
        keys: Keys of the recipe, stronger than the file's; sections as mappings: `rollout={"group_size": 8}`.

    Raises:
        PreftError: See `preft.train.grpo.run.train_grpo`.
    """
    from preft.config.grpo import resolve_grpo_recipe
    from preft.train.grpo.run import train_grpo as run

    resolved = resolve_grpo_recipe(_layers(recipe, keys))
    report = run(
        resolved,
        lambda folder: rollout_engine(resolved.recipe, folder),
        resume=resume,
        force=force,
        progress=default_progress(progress),
    )
    return TrainingRun(report.folder, report.adapter, report.to_dict())


def rollout_engine(recipe: GrpoRecipe, folder: Path, **vllm: Any) -> Any:
    """The engine that a GRPO recipe samples from.

    Args:
        recipe: The recipe.
        folder: The base model's checkpoint.
        vllm: Further vLLM engine arguments.

    Raises:
        EngineError: It could not start.
    """
    from preft.serve.settings import EngineSettings

    settings = recipe.rollout
    if settings.engine == "hf":
        from preft.serve.hf_engine import HFEngine

        return HFEngine(folder, dtype=recipe.train.base_dtype)
    from preft.serve.engine import Engine

    return Engine(
        folder,
        settings=EngineSettings(
            dtype=recipe.train.base_dtype,
            slots=1,
            max_model_len=recipe.data.max_prompt_tokens + settings.max_tokens,
            max_num_seqs=settings.prompts * settings.group_size,
            kv_cache_gib=settings.kv_cache_gib,
            vllm=vllm,
        ),
    )


def evaluate(
    model: str, adapters: Mapping[str, Path | str], tasks: str | tuple[str, ...], **settings: Any
) -> EvaluationReport:
    """Scores the base and adapters on tasks of lm-evaluation-harness, and compares them pair by pair.

    Args:
        model: Folder, known name or hub id of the base.
        adapters: Folders by name; the base is always an arm beside them.
        tasks: A task's name, or several.
        settings: `progress`, and further fields of `preft.eval.run.EvalSpec`, such as `engine`, `limit`, `compare`.

    Raises:
        PreftError: See `preft.eval.run.evaluate`.
    """
    from preft.eval.run import EvalSpec
    from preft.eval.run import evaluate as run

    progress = default_progress(settings.pop("progress", None))
    names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    spec = _spec(EvalSpec, {"model": model, "adapters": adapters, "tasks": names, **settings})
    return EvaluationReport(run(spec, progress=progress))


def run_bench(model: str, out: Path | str, **settings: Any) -> BenchReport:
    """Measures what adapters cost on this machine: arms in processes of their own, interleaved and repeated.

    Args:
        model: Folder, known name or hub id of the base.
        out: Folder for rows, pictures, the page, logs and generated adapters.
        settings: `progress`, and further fields of `preft.bench.spec.BenchSpec`, such as `arms`, `adapters`, `ranks`.

    Raises:
        PreftError: Something is refused before any engine starts.
    """
    from preft.bench.spec import BenchSpec
    from preft.bench.throughput import measure_throughput

    progress = default_progress(settings.pop("progress", None))
    spec = _spec(BenchSpec, {"model": model, "out": Path(out), **settings})
    outcome, report = measure_throughput(spec, progress=progress)
    return BenchReport(report.entries, list(report.notes), list(outcome.rows), report.page, outcome.status)


def make_plan(
    model: str,
    gpu: str,
    *,
    slots: int | None = None,
    price_per_gpu_hour: float | None = None,
    bandwidth_gbs: float | None = None,
    tflops: float | None = None,
    memory_gb: float | None = None,
    launch_us: float = 0.0,
    **workload: Any,
) -> PlanReport:
    """Predicts what prefill-only adapters gain on hardware that is not here.

    Args:
        model: Known name, folder or `config.json`, or hub id.
        gpu: `a100`, `h100`, `h200`, `b200`, `mi300x`, with `xN` for N of them; or any name with its three figures.
        slots: Adapters in one step, or None for each arm's best.
        price_per_gpu_hour: For the cost of a million output tokens.
        bandwidth_gbs: Memory bandwidth of one GPU in GB/s, in place of the table's.
        tflops: Dense matrix arithmetic of one GPU in TFLOP/s.
        memory_gb: Memory of one GPU in GB.
        launch_us: Microseconds that one adapter kernel launch costs.
        workload: `adapters`, `rank`, `direft_rank`, `input_len`, `output_len`, `requests`, `targets`, `dtype`.

    Raises:
        PreftError: The model or the GPU is not known, or a value is not valid.
    """
    from preft.plan.gpus import parse_machine
    from preft.plan.plan import Plan
    from preft.plan.roofline import Roofline
    from preft.plan.shapes import read_shape
    from preft.plan.workload import Assumptions, Workload

    given = {"adapters": 64, "rank": 16, "input_len": 512, "output_len": 256, "targets": "all", "dtype": "bfloat16"}
    given.update(workload)
    given.setdefault("direft_rank", given["rank"])
    given.setdefault("requests", max(int(str(given["adapters"])), 64))
    machine = parse_machine(gpu, bandwidth_gbs=bandwidth_gbs, tflops=tflops, memory_gb=memory_gb)
    load = _spec(Workload, given)
    roof = Roofline(read_shape(model), machine, load, Assumptions(0.90, 0.75, launch_us=launch_us, host_link=50e9))
    return PlanReport(Plan(roof, slots, price_per_gpu_hour))


def _layers(recipe: Path | str | None, keys: Mapping[str, Any]) -> list[Layer]:
    return [*([] if recipe is None else recipe_layers(recipe, ())), Layer("argument", keys)]


def _spec(kind: type[Spec], values: Mapping[str, Any]) -> Spec:
    """Builds a settings class; refuses a name that it does not have."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else None
            raise UsageError(f"`{name}` is not a setting", accepted=", ".join(known), hint=hint)
    return kind(**values)
