"""The GPU worker, its first runner, its manager and its kernels' callers, on a CPU: all of preft's code for GPUs except
launches.

The worker and the runner are the GPU ones in front of vLLM's CPU ones, which are themselves vLLM's GPU classes with
device calls taken out. vLLM's two Triton functions are replaced by plain torch that sees what the kernels see: tables
and strides, not positions. The block-site operation runs its reference. There are no graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from preft.serve.backend import guard
from preft.serve.gpu import punica
from preft.serve.gpu.runners import PreftGPUModelRunner
from preft.serve.gpu.seams import LoraKernels
from preft.serve.gpu.settings import gpu_arguments
from preft.serve.gpu.worker import PreftGPUWorker
from preft.serve.settings import EngineSettings

LAUNCHES: list[int] = []
"""Programs' rows of each launch, cleared by whoever counts."""


class EmulatedRunner(PreftGPUModelRunner, CPUModelRunner):  # type: ignore[misc]
    """The GPU runner's methods over vLLM's CPU runner."""


class EmulatedWorker(PreftGPUWorker, CPUWorker):  # type: ignore[misc]
    """The GPU worker's methods over vLLM's CPU worker, which does not let others make its runner."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = EmulatedRunner
        self.model_runner.preft_init()


def _groups(meta: tuple[torch.Tensor, ...], most_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(slot, rows) as the kernels find them: `most_rows` is what the grid reaches in a group."""
    _token_slots, sorted_rows, counts, starts, slots, no_lora, num_groups = meta
    assert not bool(no_lora)
    # The table is cut like the rows, and the kernels read past its end, as do these.
    whole = sorted_rows.as_strided((int(counts.sum()),), (1,))
    LAUNCHES.append(most_rows * int(num_groups))
    for place in range(int(num_groups)):
        if int(slots[place]) >= 0:
            rows = whole[int(starts[place]) : int(starts[place]) + int(counts[place])]
            yield int(slots[place]), rows[:most_rows].long()


def shrink(x: torch.Tensor, downs: list[torch.Tensor], buffer: torch.Tensor, *rest: Any) -> None:
    *meta, scale = rest
    buffer.zero_()
    for slot, rows in _groups(tuple(meta), x.shape[0]):
        whole = x.as_strided((int(rows.max()) + 1, x.shape[1]), x.stride())
        for index, down in enumerate(downs):
            buffer[index, rows] = (whole[rows] @ down[slot, 0].T).float() * scale


def expand(buffer: torch.Tensor, ups: list[torch.Tensor], y: torch.Tensor, *rest: Any) -> None:
    *meta, offset, add = rest
    assert add
    for slot, rows in _groups(tuple(meta), buffer.shape[1]):
        column = offset
        for index, up in enumerate(ups):
            whole = buffer[index].as_strided((int(rows.max()) + 1, buffer.shape[2]), buffer.stride()[1:])
            y[rows, column : column + up.shape[2]] += (whole[rows] @ up[slot, 0].float().T).to(y.dtype)
            column += up.shape[2]


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """While it lasts, engines that start in this process have the GPU worker."""
    plain = EngineSettings.engine_arguments

    def arguments(self: EngineSettings, model: str, **kwargs: Any) -> dict[str, Any]:
        found = plain(self, model, **kwargs)
        return {**found, **gpu_arguments(self.slots, self.max_rank), "enforce_eager": True}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, guard.EXPERIMENTAL_GPU, "1")
        patch.setattr(guard, "CPU_WORKER_CLASS", f"{__name__}.EmulatedWorker")
        patch.setattr(EngineSettings, "engine_arguments", arguments)
        patch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
        patch.setattr(punica, "lora_kernels", lambda: LoraKernels(shrink, expand, LoRAKernelMeta))
        yield
