"""The private parts of vLLM that GPU serving reaches into, beyond the CPU backend's; checked before use.

The GPU wheel carries the same Python as the CPU wheel, so tests pin these against the installed source. What Triton
compiles can be imported only where Triton works, and is looked up late.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from preft.serve.backend import guard

SEAMS: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.init_device": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch": ("self",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding": (
        "self",
        "num_tokens",
        "num_reqs",
        "num_scheduled_tokens_np",
        "max_num_scheduled_tokens",
        "use_cascade_attn",
        "allow_microbatching",
        "force_eager",
        "force_uniform_decode",
        "force_has_lora",
        "force_num_active_loras",
        "num_encoder_reqs",
    ),
    "vllm.v1.worker.gpu.lora_utils:LoraState.__init__": ("self", "max_num_reqs"),
    "vllm.v1.worker.gpu.lora_utils:LoraState.add_request": ("self", "req_id", "req_index", "lora_request"),
    "vllm.v1.worker.gpu.lora_utils:LoraState.remove_request": ("self", "req_id"),
    "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs": (
        "self",
        "req_ids",
        "idx_mapping",
        "num_scheduled_tokens",
    ),
    "vllm.v1.worker.gpu.lora_utils:LoraState.get_activate_loras": ("self", "req_ids"),
    "vllm.v1.worker.gpu.lora_utils:get_num_active_loras_for_dispatch": (
        "lora_config",
        "lora_state",
        "req_ids",
        "dummy_run",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests": ("self", "scheduler_output"),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras": (
        "self",
        "prompt_lora_mapping",
        "token_lora_mapping",
        "lora_requests",
        "mapping_type",
    ),
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.__init__": (
        "self",
        "max_num_batched_tokens",
        "max_batches",
        "device",
        "kwargs",
    ),
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_shrink": (
        "self",
        "y",
        "x",
        "lora_a_stacked",
        "scale",
        "kwargs",
    ),
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_expand": (
        "self",
        "y",
        "x",
        "lora_b_stacked",
        "output_slices",
        "offset_start",
        "add_inputs",
        "kwargs",
    ),
    "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta.meta_args": (
        "self",
        "token_nums",
        "specialize_active_lora",
    ),
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.reset_lora": ("self", "index"),
}


@dataclass(frozen=True)
class LoraKernels:
    """vLLM's Triton LoRA kernels.

    Attributes:
        shrink: The function that launches the first one.
        expand: The function that launches the second.
        meta: Class of their tables.
    """

    shrink: Callable[..., None]
    expand: Callable[..., None]
    meta: Any


def lora_kernels() -> LoraKernels:
    """VLLM's LoRA kernels, from the modules that hold them."""
    folder = "vllm.lora.ops.triton_ops"
    return LoraKernels(
        importlib.import_module(f"{folder}.lora_shrink_op")._lora_shrink,
        importlib.import_module(f"{folder}.lora_expand_op")._lora_expand,
        importlib.import_module(f"{folder}.lora_kernel_metadata").LoRAKernelMeta,
    )


def require_gpu_seams() -> None:
    """Checks what GPU serving reaches into. Raises `EngineError` naming each part that has changed."""
    guard.require_worker_seams()
    guard.require_signatures(SEAMS)
