"""Opening the engine of an arm, behind the one interface that a run drives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.bench.facts import is_compiled
from preft.bench.job import ArmJob
from preft.bench.measure import Delivered
from preft.data.requests import GenerationRequest
from preft.errors import EngineError
from preft.serve.engine import Engine
from preft.serve.kernel_time import KernelClock, unmeasured, watch_preft, watch_stock
from preft.serve.settings import EngineSettings
from preft.serve.stock import StockEngine, StockSettings, execution_facts


class Kernels:
    """The time of an engine's adapter kernels, or why it is not known.

    Args:
        engine: How the engine runs.
        watch: Begins to watch, or None for an engine without such kernels.
    """

    def __init__(self, engine: Mapping[str, Any], watch: Callable[[], KernelClock] | None) -> None:
        self._reason = unmeasured(engine)
        self._clock = watch() if watch is not None and self._reason is None else None

    def seconds(self) -> float | None:
        """So far."""
        if self._reason is not None:
            return None
        return self._clock.seconds if self._clock is not None else 0.0

    def facts(self) -> dict[str, Any]:
        """Why it is not known, if it is not."""
        return {"adapter_kernels_unmeasured": self._reason}


class StockStepper:
    """Stock vLLM as a `Stepper`."""

    def __init__(self, engine: StockEngine) -> None:
        self._engine = engine
        # Without adapters vLLM has no such kernels at all.
        self._kernels = Kernels(execution_facts(engine.core), watch_stock if engine.settings.adapters else None)

    def adapter_s(self) -> float | None:
        """Seconds in adapter kernels."""
        return self._kernels.seconds()

    def submit(self, prompt: Sequence[int], adapter: int | None, max_tokens: int) -> str:
        """Adds a request."""
        return self._engine.submit(prompt, adapter, max_tokens)

    def step(self) -> list[Delivered]:
        """Runs one step."""
        return _delivered(self._engine.core.step())

    def has_unfinished(self) -> bool:
        """Whether a request is left."""
        return bool(self._engine.core.has_unfinished_requests())

    def facts(self) -> Mapping[str, Any]:
        """How it runs."""
        return {**execution_facts(self._engine.core), **self._kernels.facts()}


class PreftStepper:
    """Our engine as a `Stepper`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kernels = Kernels(engine.execution_facts(), watch_preft)

    def adapter_s(self) -> float | None:
        """Seconds in adapter kernels."""
        return self._kernels.seconds()

    def submit(self, prompt: Sequence[int], adapter: int | None, max_tokens: int) -> str:
        """Adds a request."""
        name = f"a{adapter}" if adapter is not None else None
        return self._engine.submit(
            GenerationRequest("run", tuple(prompt), name, max_tokens=max_tokens, ignore_eos=True)
        )

    def step(self) -> list[Delivered]:
        """Runs one step."""
        return [Delivered(one.ticket, one.num_tokens, one.result is not None) for one in self._engine.step()]

    def has_unfinished(self) -> bool:
        """Whether a request is left."""
        return self._engine.has_unfinished

    def facts(self) -> Mapping[str, Any]:
        """How it runs."""
        return {**self._engine.execution_facts(), **self._kernels.facts()}


def bind_ranks(ranks: int) -> None:
    """Gives each CPU worker an even share of the cores, or none in particular where there are fewer than workers."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1 or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    share = len(cores) // ranks
    shares = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    bound = "|".join(",".join(map(str, own)) for own in shares) if share else "nobind"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound


def open_arm(job: ArmJob) -> StockStepper | PreftStepper:
    """Starts the engine of an arm.

    Raises:
        EngineError: It does not start, or an adapter cannot be served.
    """
    bind_ranks(job.tp)
    paths = [Path(path) for path in job.adapter_paths]
    if job.arm in ("base", "base-compiled", "stock-lora"):
        settings = StockSettings(
            adapters=tuple(paths),
            slots=job.slots,
            max_rank=job.rank,
            dtype=job.dtype,
            max_model_len=job.input_len + job.output_len,
            max_num_seqs=job.max_num_seqs,
            kv_cache_gib=job.kv_cache_gib,
            eager=job.mode == "eager" and not is_compiled(job.arm),
            tp=job.tp,
        )
        return StockStepper(StockEngine(Path(job.model), settings))
    ours = EngineSettings(
        slots=job.slots,
        dtype=job.dtype,
        max_model_len=job.input_len + job.output_len,
        max_num_seqs=job.max_num_seqs,
        kv_cache_gib=job.kv_cache_gib,
        adapter_cache_gib=job.adapter_cache_gib,
        compiled=job.mode != "eager" or is_compiled(job.arm),
        vllm={
            "skip_tokenizer_init": True,
            **({"tensor_parallel_size": job.tp, "distributed_executor_backend": "mp"} if job.tp > 1 else {}),
        },
    )
    engine = Engine(job.model, {f"a{index}": path for index, path in enumerate(paths)}, settings=ours)
    if engine.unavailable:
        first = engine.unavailable[0]
        raise EngineError(
            f"{len(engine.unavailable)} adapters cannot be served", got=f"`{first.name}`: {first.error.what}"
        )
    return PreftStepper(engine)


def _delivered(outputs: Any) -> list[Delivered]:
    return [Delivered(output.request_id, len(output.outputs[0].token_ids), output.finished) for output in outputs]
