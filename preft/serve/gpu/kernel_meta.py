"""What vLLM's LoRA kernels want to know of a step, from the row plan: no sorting on the device, no waiting for it.

vLLM builds it with `torch.all`, `torch.sort` and `torch.unique` on the GPU and waits for the answers. The host knows
them already. Here all six tables are views of one allocation at a fixed address, and one copy fills them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from preft_kernels.segments import RowPlan

_ALIGN = 16


@dataclass(frozen=True)
class HostMeta:
    """vLLM's tables of one step, on the host.

    Attributes:
        token_slots: [T] int32: slot of each row, -1 for base.
        sorted_rows: [T] int32: rows sorted by slot, base rows first.
        slots: [slots + 1] int32: -1 if there are base rows, then the slots in use, then -1.
        rows_per_slot: [slots + 1] int32, in the order of `slots`.
        starts: [slots + 2] int32: first index into `sorted_rows`.
        num_groups: Entries of `slots` in use, base rows included.
    """

    token_slots: np.ndarray
    sorted_rows: np.ndarray
    slots: np.ndarray
    rows_per_slot: np.ndarray
    starts: np.ndarray
    num_groups: int


def host_meta(plan: RowPlan, num_tokens: int, num_slots: int) -> HostMeta:
    """VLLM's tables for a plan over `num_tokens` rows."""
    token_slots = plan.slot_of_row(num_tokens)
    base = np.flatnonzero(token_slots < 0).astype(np.int32)
    used, counts = np.unique(token_slots, return_counts=True)
    slots = np.full(num_slots + 1, -1, np.int32)
    rows_per_slot = np.zeros(num_slots + 1, np.int32)
    starts = np.zeros(num_slots + 2, np.int32)
    slots[: len(used)] = used
    rows_per_slot[: len(used)] = counts
    starts[1 : len(used) + 1] = np.cumsum(counts)
    return HostMeta(token_slots, np.concatenate([base, plan.rows]), slots, rows_per_slot, starts, len(used))


class KernelMeta:
    """vLLM's tables on the device.

    Args:
        max_tokens: Rows of the largest batch, padding included.
        num_slots: Slots.
        device: Where they lie.
        kind: vLLM's `LoRAKernelMeta`; handed in, since it can be imported only where Triton works.
        num_staging: Host buffers used in turn.

    Attributes:
        meta: vLLM's object over our memory.
    """

    def __init__(
        self, max_tokens: int, num_slots: int, device: torch.device | str, kind: Any, num_staging: int = 3
    ) -> None:
        self.max_tokens, self.num_slots = max_tokens, num_slots
        sizes = [max_tokens, max_tokens, num_slots + 1, num_slots + 1, num_slots + 2]
        offsets = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)]).tolist()
        self._spans = [slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=False)]
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._device = torch.full((offsets[-1],), -1, dtype=torch.int32, device=self.device)
        self._staging = [torch.zeros(offsets[-1], dtype=torch.int32, pin_memory=on_gpu) for _ in range(num_staging)]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(num_staging)]
        self._turn = 0
        token_slots, sorted_rows, slots, rows_per_slot, starts = (self._device[span] for span in self._spans)
        self.meta = kind(
            token_lora_mapping=token_slots,
            token_indices_sorted_by_lora_ids=sorted_rows,
            active_lora_ids=slots,
            num_tokens_per_lora=rows_per_slot,
            lora_token_start_loc=starts,
            no_lora_flag_cpu=torch.tensor([True]),
            num_active_loras_cpu=torch.tensor([0], dtype=torch.int32),
            default_num_active_loras_cpu=torch.tensor([num_slots + 1], dtype=torch.int32),
            captured_lora_counts=[],
        )

    def upload(self, plan: RowPlan, num_tokens: int, *, launch: bool) -> None:
        """Makes a plan the one that vLLM's kernels work on.

        Args:
            plan: Rows; may be empty even if kernels are launched, as when a graph is captured.
            num_tokens: Rows of the batch.
            launch: Whether kernels are launched at all. If not, nothing is copied.
        """
        self.meta.no_lora_flag_cpu[0] = not launch
        if not launch:
            self.meta.num_active_loras_cpu[0] = 0
            return
        host = host_meta(plan, num_tokens, self.num_slots)
        self._turn = (self._turn + 1) % len(self._staging)
        staging, copied = self._staging[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        flat = staging.numpy()
        # Rows of padding, up to the size of a graph, are nobody's.
        flat[self._spans[0]] = -1
        tables = (host.token_slots, host.sorted_rows, host.slots, host.rows_per_slot, host.starts)
        for span, table in zip(self._spans, tables, strict=True):
            flat[span.start : span.start + len(table)] = table
        self._device.copy_(staging, non_blocking=True)
        if copied is not None:
            copied.record()
        self.meta.num_active_loras_cpu[0] = host.num_groups
