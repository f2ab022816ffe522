"""vLLM's GPU punica wrapper, told its rows by us: no mapping by request, no waiting for the device, a tight grid."""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper import punica_gpu

from preft.errors import EngineError
from preft.serve.gpu import linear_op
from preft.serve.gpu.kernel_meta import KernelMeta
from preft.serve.gpu.linear_op import Grid, LinearCalls
from preft.serve.gpu.seams import lora_kernels
from preft.serve.gpu.step import Step

_KEY = "model"


class PreftPunicaGPU(punica_gpu.PunicaWrapperGPU):
    """Serves the wrapped linear modules of one model.

    Adapters at the head are not served on GPUs yet, so rows of logits have no mapping.

    Attributes:
        calls: What the opaque operations look up.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        # vLLM leaves it uninitialised; a row of padding could point anywhere.
        self._token_lora_indices.fill_(-1)
        kernels = lora_kernels()
        self._tables = KernelMeta(max_num_batched_tokens, self.max_loras, device, kernels.meta)
        self.token_mapping_meta = self._tables.meta
        self.calls = LinearCalls(
            kernels.shrink, kernels.expand, lambda count: self._tables.meta.meta_args(count, False)
        )
        linear_op.bind(_KEY, self.calls)

    def set_step(self, step: Step, *, launch: bool) -> None:
        """Sets what the next forward pass works on.

        Args:
            step: Decided rows.
            launch: Whether kernels are launched: the step has adapters, or a graph is captured for steps that have.
        """
        self._tables.upload(step.plan, step.num_tokens, launch=launch)
        self.calls.launch = launch
        groups = step.plan.num_slots + (step.plan.num_rows < step.num_tokens)
        self.calls.grid = Grid.fit(step.plan.longest, groups) if step.plan.num_rows else None

    def update_metadata(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuses vLLM's own mapping, which is by request."""
        raise EngineError("vLLM mapped a step by request instead of by position")

    def add_shrink(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **_: Any
    ) -> None:
        """Fills the buffer `y` [slices, T, r] with the inner products of `x` [T, K]."""
        torch.ops.preft_gpu_linear.shrink(y, x.view(-1, x.shape[-1]), list(lora_a_stacked), scale, _KEY)

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **_: Any,
    ) -> None:
        """Adds what the buffer `x` [slices, T, r] stands for to `y` [T, sum of slices]."""
        flat = y.view(-1, y.shape[-1])
        torch.ops.preft_gpu_linear.expand(flat, x, list(lora_b_stacked), offset_start, add_inputs, _KEY)
