"""All-token LoRA row by row, for benchmarks only: the fair baseline that prompt-only adapters are measured against.

One program works on one row and a part of its input or output: vector units, no matrix units, since in decode nearly
every row has an adapter of its own. The grid follows the real number of rows. Two launches a module; partial sums over
the input are kept apart and added in a fixed order, so there are no atomics and nothing to fill with zeros first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MAX_SLICES = 3
SPLIT = 4
"""Parts of the input of a row."""


@triton.jit
def rows_down_kernel(
    x_ptr,
    down0_ptr,
    down1_ptr,
    down2_ptr,
    inner_ptr,
    rows_ptr,
    slots_ptr,
    width,
    x_stride,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """inner[i, part, slice] = the part's share of x[rows[i]] @ down[slice][slots[i]].T, in float32."""
    item = tl.program_id(0)
    part = tl.program_id(1)
    slice_id = tl.program_id(2)
    row = tl.load(rows_ptr + item).to(tl.int64)
    slot = tl.load(slots_ptr + item).to(tl.int64)
    down_ptr = down0_ptr
    if SLICES > 1:
        if slice_id == 1:
            down_ptr = down1_ptr
    if SLICES > 2:
        if slice_id == 2:
            down_ptr = down2_ptr
    rank_at = tl.arange(0, PADDED)
    rank_ok = rank_at < RANK
    total = tl.zeros((PADDED, COLUMNS), dtype=tl.float32)
    for start in range(part * COLUMNS, width, COLUMNS * PARTS):
        column = start + tl.arange(0, COLUMNS)
        column_ok = column < width
        x = tl.load(x_ptr + row * x_stride + column, mask=column_ok, other=0.0).to(tl.float32)
        down = tl.load(
            down_ptr + (slot * RANK + rank_at[:, None]) * width + column[None, :],
            mask=rank_ok[:, None] & column_ok[None, :],
            other=0.0,
        ).to(tl.float32)
        total += x[None, :] * down
    inner_row = ((item * PARTS + part) * SLICES + slice_id) * RANK
    tl.store(inner_ptr + inner_row + rank_at, tl.sum(total, axis=1), mask=rank_ok)


@triton.jit
def rows_up_kernel(
    inner_ptr,
    y_ptr,
    up_ptr,
    scales_ptr,
    rows_ptr,
    slots_ptr,
    width,
    y_stride,
    first_column,
    slice_id,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """y[rows[i], slice] += scales[slot] * inner[i, slice] @ up[slot].T."""
    item = tl.program_id(0)
    row = tl.load(rows_ptr + item).to(tl.int64)
    slot = tl.load(slots_ptr + item).to(tl.int64)
    rank_at = tl.arange(0, PADDED)
    rank_ok = rank_at < RANK
    inner = tl.zeros((PADDED,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        inner += tl.load(
            inner_ptr + ((item * PARTS + part) * SLICES + slice_id) * RANK + rank_at, mask=rank_ok, other=0.0
        )
    inner = inner * tl.load(scales_ptr + slot)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < width
    up = tl.load(
        up_ptr + (slot * width + column[:, None]) * RANK + rank_at[None, :],
        mask=column_ok[:, None] & rank_ok[None, :],
        other=0.0,
    ).to(tl.float32)
    y_row = y_ptr + row * y_stride + first_column + column
    y = tl.load(y_row, mask=column_ok, other=0.0)
    tl.store(y_row, (y.to(tl.float32) + tl.sum(up * inner[None, :], axis=1)).to(y.dtype), mask=column_ok)


def lora_rows_(
    y: torch.Tensor,
    x: torch.Tensor,
    downs: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    scales: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    scratch: torch.Tensor | None = None,
) -> None:
    """Adds each row's own adapter's update in place; see `reference.lora_rows_reference`.

    Args:
        y: [T, sum of N_j], unit stride within a row.
        x: [T, K], unit stride within a row.
        downs: For each of one to three slices, [slots, r, K], contiguous.
        ups: For each slice, [slots, N_j, r], contiguous.
        scales: [slots] float32.
        rows: [n] int32, unique.
        slots: [n] int32.
        scratch: [n, SPLIT, slices, r] float32, or None to allocate it.

    Raises:
        ValueError: More slices than are served, or a row that is not contiguous.
    """
    count, slices = rows.numel(), len(downs)
    if not 1 <= slices <= MAX_SLICES or x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError(f"{slices} slices, strides {x.stride()} and {y.stride()}")
    if not count:
        return
    rank, width = downs[0].shape[1:]
    padded = max(4, triton.next_power_of_2(rank))
    if scratch is None:
        scratch = torch.empty(count, SPLIT, slices, rank, dtype=torch.float32, device=y.device)
    columns = max(32, min(256, 4096 // padded))
    filled = [*downs, *[downs[0]] * (MAX_SLICES - slices)]
    shape = {"RANK": rank, "PADDED": padded, "SLICES": slices, "PARTS": SPLIT, "COLUMNS": columns}
    rows_down_kernel[(count, SPLIT, slices)](x, *filled, scratch, rows, slots, width, x.stride(0), **shape)
    first = 0
    for index, up in enumerate(ups):
        wide = up.shape[1]
        grid = (count, triton.cdiv(wide, columns))
        rows_up_kernel[grid](scratch, y, up, scales, rows, slots, wide, y.stride(0), first, index, **shape)
        first += wide
