"""Opening the engine of an arm, behind the one interface that a run drives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.bench.job import ArmJob
from preft.bench.measure import Delivered
from preft.data.requests import GenerationRequest
from preft.errors import EngineError
from preft.serve.engine import Engine
from preft.serve.settings import EngineSettings
from preft.serve.stock import StockEngine, StockSettings, execution_facts


class StockStepper:
    """Stock vLLM as a `Stepper`."""

    def __init__(self, engine: StockEngine) -> None:
        self._engine = engine

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
        return execution_facts(self._engine.core)


class PreftStepper:
    """Our engine as a `Stepper`. It is driven below `generate`, which reports no request before its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, prompt: Sequence[int], adapter: int | None, max_tokens: int) -> str:
        """Adds a request."""
        name = f"a{adapter}" if adapter is not None else None
        return self._engine._submit(
            GenerationRequest("run", tuple(prompt), name, max_tokens=max_tokens, ignore_eos=True)
        )

    def step(self) -> list[Delivered]:
        """Runs one step."""
        return _delivered(self._engine._core.step())

    def has_unfinished(self) -> bool:
        """Whether a request is left."""
        return bool(self._engine._core.has_unfinished_requests())

    def facts(self) -> Mapping[str, Any]:
        """How it runs."""
        return execution_facts(self._engine._core)


def open_arm(job: ArmJob) -> StockStepper | PreftStepper:
    """Starts the engine of an arm.

    Raises:
        EngineError: It does not start, or an adapter cannot be served.
    """
    paths = [Path(path) for path in job.adapter_paths]
    if job.arm in ("base", "stock-lora"):
        settings = StockSettings(
            adapters=tuple(paths),
            slots=job.slots,
            max_rank=job.rank,
            dtype=job.dtype,
            max_model_len=job.input_len + job.output_len,
            max_num_seqs=job.max_num_seqs,
            kv_cache_gib=job.kv_cache_gib,
            eager=job.mode == "eager",
        )
        return StockStepper(StockEngine(Path(job.model), settings))
    ours = EngineSettings(
        slots=job.slots,
        dtype=job.dtype,
        max_model_len=job.input_len + job.output_len,
        max_num_seqs=job.max_num_seqs,
        kv_cache_gib=job.kv_cache_gib,
        adapter_cache_gib=job.adapter_cache_gib,
        vllm={"skip_tokenizer_init": True, **({"enforce_eager": True} if job.mode == "eager" else {})},
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
