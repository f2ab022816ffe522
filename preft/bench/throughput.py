"""The throughput bench as one call: what may be refused first, then the run, then the report."""

from __future__ import annotations

import importlib.util
from typing import Any

from preft.bench.facts import available_memory, read_facts, room_for_adapters
from preft.bench.report import Report, write_report
from preft.bench.runner import Outcome, run_bench
from preft.bench.spec import BenchSpec, require_fitting, require_writable
from preft.config.progress import Progress
from preft.errors import EngineError
from preft.models.locate import locate_model
from preft.pictures import require_matplotlib


def require_runnable(spec: BenchSpec, *, adapter_dir: str = "adapter_dir") -> None:
    """Checks what can be checked before a model is fetched.

    Args:
        spec: What is asked.
        adapter_dir: What the caller's users call the folder of generated adapters.

    Raises:
        FileError: A folder cannot be written.
        EngineError: A package is missing.
    """
    require_writable(spec.out)
    require_writable(spec.generated, flag=adapter_dir)
    require_matplotlib("Plots")
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed", hint="`make setup` on CPU, `make gpu` on NVIDIA")


def measure_throughput(
    spec: BenchSpec, *, adapter_dir: str = "adapter_dir", progress: Progress | None = None, **parts: Any
) -> tuple[Outcome, Report]:
    """Checks, measures and writes rows, pictures and page.

    Args:
        spec: What is asked.
        adapter_dir: See `require_runnable`.
        progress: Told of each process.
        parts: Replacements for parts of `run_bench`, for tests.

    Raises:
        PreftError: Something is refused before any engine starts, or cannot be written.
    """
    require_runnable(spec, adapter_dir=adapter_dir)
    folder = locate_model(spec.model, progress=progress)
    facts = read_facts(folder, spec.dtype, spec.targets)
    require_fitting(spec, facts, memory_bytes=available_memory(), disk_bytes=room_for_adapters(spec.generated))
    outcome = run_bench(spec, folder, facts, progress=progress, **parts)
    return outcome, write_report(outcome.rows, outcome.status, outcome.setup, spec.out)
