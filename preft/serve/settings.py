"""How an engine is set up: one set of values, from which vLLM's arguments follow for every way to start one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from preft.errors import UsageError
from preft.version import __version__

GIB = 1 << 30
MAX_RANK = 512

OURS = frozenset(
    {
        "model",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "lora_modules",
        "lora_dtype",
        "default_mm_loras",
        "lora_target_modules",
        "scheduler_cls",
        "worker_cls",
        "worker_extension_cls",
        "additional_config",
        "fully_sharded_loras",
        "specialize_active_lora",
        "enable_tower_connector_lora",
    }
)
"""vLLM arguments that preft sets itself; naming one is refused, not overridden."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a vLLM engine with preft's backend.

    Attributes:
        slots: Adapters that one step may hold; the number in flight is not bounded by it.
        max_rank: Largest adapter rank accepted.
        dtype: Type of weights and activations: `auto`, `float32`, `bfloat16` or `float16`.
        max_model_len: Longest prompt plus output in tokens, or None for the model's own limit.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Tokens of one step, or None for vLLM's default.
        kv_cache_gib: Size of the KV cache in GiB.
        adapter_cache_gib: Host memory for adapters in GiB.
        patience_s: Seconds that a request waits for a slot before later ones are held back for it.
        lm_head: Whether adapters may have an `lm_head` site; costs memory for each slot on GPUs.
        allow_base_mismatch: Accept adapters made for other weights of the same architecture.
        compiled: Compile the model's forward pass, which takes minutes at the first start and makes steps faster.
        adapter_metrics: Adapters that a server's metrics count by name at most; 0 counts none by name.
        vllm: Any further vLLM engine arguments, by their Python names.
    """

    slots: int = 8
    max_rank: int = MAX_RANK
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    kv_cache_gib: float = 1.0
    adapter_cache_gib: float = 4.0
    patience_s: float = 1.0
    lm_head: bool = False
    allow_base_mismatch: bool = False
    compiled: bool = False
    adapter_metrics: int = 0
    vllm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = (
            ("slots", 1, 4096),
            ("max_rank", 1, MAX_RANK),
            ("max_num_seqs", 1, 65536),
            ("adapter_metrics", 0, 10_000),
        )
        for name, least, most in limits:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UsageError(
                    f"The engine setting `{name}` is not valid", got=repr(value), accepted=f"{least} to {most}"
                )
        for name in ("kv_cache_gib", "adapter_cache_gib"):
            if not getattr(self, name) > 0:
                raise UsageError(f"The engine setting `{name}` is not valid", got=repr(getattr(self, name)))
        if self.compiled and self.vllm.get("enforce_eager"):
            raise UsageError("The engine is set to compile and to run eager", got="`compiled` and `enforce_eager`")
        taken = sorted(OURS & {key.replace("-", "_") for key in self.vllm})
        if taken:
            raise UsageError(
                "preft sets these vLLM arguments itself",
                got=", ".join(taken),
                hint="remove them; see `preft serve --help`",
            )

    def engine_arguments(self, model: str, *, server: bool = False) -> dict[str, Any]:
        """Arguments for vLLM's `EngineArgs`, by their Python names.

        Args:
            model: The checkpoint's folder.
            server: Whether a front end in another process takes the scheduler's counts for its metrics.
        """
        # The backend's modules name vLLM at import, the settings must not.
        from preft.serve.backend import guard
        from preft.serve.backend.options import BackendOptions

        on_gpu, max_rank = guard.gpu_build() is not None, self.max_rank
        if on_gpu and max_rank == MAX_RANK:
            # The default asks for no limit, which costs nothing on CPU and device memory for each slot on GPUs.
            from preft_kernels import tuning

            max_rank = tuning.MAX_RANK
        options = BackendOptions(
            version=__version__,
            slots=self.slots,
            max_rank=max_rank,
            cache_bytes=int(self.adapter_cache_gib * GIB),
            patience_s=self.patience_s,
            lm_head=self.lm_head,
            allow_base_mismatch=self.allow_base_mismatch,
            server=server,
            adapter_metrics=self.adapter_metrics,
            compiled=self.compiled,
        )
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": int(self.kv_cache_gib * GIB),
            "enable_lora": True,
            "max_loras": self.slots,
            # On CPU the adapters' numbers live in packed form; vLLM's padded stacks are allocated but never used.
            "max_lora_rank": 1,
            "max_cpu_loras": self.slots,
            "enforce_eager": not self.compiled,
            "scheduler_cls": guard.SCHEDULER_CLASS,
            "worker_cls": guard.worker_class(),
            "additional_config": options.to_config(),
        }
        if on_gpu:
            from preft.serve.gpu.settings import CODE_KEY, code_hash, gpu_arguments

            arguments |= gpu_arguments(self.slots, max_rank)
            arguments["additional_config"][CODE_KEY] = code_hash()
        return {**{key: value for key, value in arguments.items() if value is not None}, **self.vllm}


def bind_all_cores(environment: dict[str, str] | None = None) -> None:
    """Lets vLLM's CPU worker use every core this process may use, unless the user bound it himself.

    vLLM reserves one core for its front end by default. On a small machine that is half of it: both cores of two
    gave 487-785 tokens/s where one gave 323-445 (SmolLM2-135M, bf16).
    """
    environment = os.environ if environment is None else environment  # type: ignore[assignment]
    assert environment is not None
    if "VLLM_CPU_OMP_THREADS_BIND" not in environment:
        cores = sorted(os.sched_getaffinity(0))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
