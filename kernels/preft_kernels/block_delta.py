"""The fused update of a block-output site (DiReFT) at planned rows: one launch for all slots.

    hidden[rows] += (down(hidden + residual) + bias) up

Programs stride over the plan's tiles, so the grid is a constant, the number of adapters never enters it, and a replayed
graph works on whatever plan lies in the buffers. There are no atomics and no split sums: a row's result depends on
nothing but its own numbers and its slot's, in a fixed order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from preft_kernels.segments import TILE_ROWS, PlanBuffer
from preft_kernels.tables import BlockTables
from preft_kernels.tuning import MAX_RANK, BlockDeltaConfig, block_delta_config, padded_rank


@triton.jit
def inner_products(
    hidden_row,
    residual_row,
    down_row,
    rank_ok,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[ROWS, PADDED] float32: the stream of some rows times `down`."""
    in_at = tl.arange(0, COLUMNS_IN)
    inner = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS_IN, num_stages=STAGES):
        column = start + in_at
        if WIDTH % COLUMNS_IN == 0:
            stream = tl.load(hidden_row + column[None, :]).to(tl.float32)
            if HAS_RESIDUAL:
                stream += tl.load(residual_row + column[None, :]).to(tl.float32)
            down = tl.load(down_row + column[:, None], mask=rank_ok[None, :], other=0.0, eviction_policy="evict_last")
        else:
            column_ok = column < WIDTH
            stream = tl.load(hidden_row + column[None, :], mask=column_ok[None, :], other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                stream += tl.load(residual_row + column[None, :], mask=column_ok[None, :], other=0.0).to(tl.float32)
            down = tl.load(
                down_row + column[:, None],
                mask=column_ok[:, None] & rank_ok[None, :],
                other=0.0,
                eviction_policy="evict_last",
            )
        # The model's own addition rounds the stream to its type in the same way.
        inner = tl.dot(stream.to(down.dtype), down, inner, input_precision=PRECISION)
    return inner


@triton.jit
def add_products(
    inner_rounded,
    hidden_row,
    up_row,
    row_ok,
    rank_ok,
    WIDTH: tl.constexpr,
    COLUMNS_OUT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds inner products times `up` to some rows of `hidden`."""
    out_at = tl.arange(0, COLUMNS_OUT)
    for start in tl.range(0, WIDTH, COLUMNS_OUT, num_stages=STAGES):
        column = start + out_at
        if WIDTH % COLUMNS_OUT == 0:
            up = tl.load(up_row + column[None, :], mask=rank_ok[:, None], other=0.0, eviction_policy="evict_last")
            base = tl.load(hidden_row + column[None, :])
            keep = row_ok[:, None]
        else:
            column_ok = column < WIDTH
            up = tl.load(
                up_row + column[None, :],
                mask=rank_ok[:, None] & column_ok[None, :],
                other=0.0,
                eviction_policy="evict_last",
            )
            base = tl.load(hidden_row + column[None, :], mask=column_ok[None, :], other=0.0)
            keep = row_ok[:, None] & column_ok[None, :]
        total = base.to(tl.float32) + tl.dot(inner_rounded, up, input_precision=PRECISION)
        tl.store(hidden_row + column[None, :], total.to(base.dtype), mask=keep)


@triton.jit
def block_delta_kernel(
    hidden_ptr,
    residual_ptr,
    down_ptr,
    bias_ptr,
    up_ptr,
    ranks_ptr,
    header_ptr,
    tiles_ptr,
    rows_ptr,
    hidden_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS_IN: tl.constexpr,
    COLUMNS_OUT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """See `block_delta_`. PARTS parts of ROWS rows make a planned tile; parts beyond a tile's length do nothing."""
    num_tiles = tl.load(header_ptr)
    row_at = tl.arange(0, ROWS)
    rank_at = tl.arange(0, PADDED)
    for work in range(tl.program_id(0), num_tiles * PARTS, tl.num_programs(0)):
        # First parts of all tiles, then second parts: most tiles of many adapters have no second part.
        tile = work % num_tiles
        part = work // num_tiles
        slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
        first = tl.load(tiles_ptr + tile * 3 + 1) + part * ROWS
        length = tl.load(tiles_ptr + tile * 3 + 2) - part * ROWS
        rank = tl.load(ranks_ptr + slot)
        if (length > 0) & (rank > 0):
            rank_ok = rank_at < rank
            row_ok = row_at < length
            # Rows past the end repeat the last one: always legal to read, never written.
            row = tl.load(rows_ptr + first + tl.minimum(row_at, length - 1)).to(tl.int64)
            hidden_row = hidden_ptr + row[:, None] * hidden_stride
            residual_row = residual_ptr + row[:, None] * residual_stride
            down_row = down_ptr + slot * (RANK * WIDTH) + rank_at[None, :] * WIDTH
            up_row = up_ptr + slot * (RANK * WIDTH) + rank_at[:, None] * WIDTH
            inner = inner_products(
                hidden_row, residual_row, down_row, rank_ok,
                WIDTH, HAS_RESIDUAL, ROWS, PADDED, COLUMNS_IN, STAGES, PRECISION,
            )  # fmt: skip
            bias = tl.load(bias_ptr + slot * RANK + rank_at, mask=rank_ok, other=0.0)
            inner += bias.to(tl.float32)[None, :]
            inner_rounded = inner.to(up_ptr.dtype.element_ty)
            add_products(inner_rounded, hidden_row, up_row, row_ok, rank_ok, WIDTH, COLUMNS_OUT, STAGES, PRECISION)


def constants(
    tables_rank: int, width: int, config: BlockDeltaConfig, *, has_residual: bool, dtype: torch.dtype
) -> dict:
    """Compile-time arguments of the kernel."""
    return {
        "WIDTH": width,
        "RANK": tables_rank,
        "PADDED": padded_rank(tables_rank),
        "HAS_RESIDUAL": has_residual,
        "ROWS": config.rows,
        "PARTS": TILE_ROWS // config.rows,
        "COLUMNS_IN": config.columns_in,
        "COLUMNS_OUT": config.columns_out,
        "STAGES": config.stages,
        # Else float32 products would be TF32, which is off by 3e-4.
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
    }


def block_delta_(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    tables: BlockTables,
    plan: PlanBuffer,
    config: BlockDeltaConfig | None = None,
    num_programs: int | None = None,
) -> None:
    """Adds the update to `hidden` in place at the rows of the plan; see `reference.block_delta_reference`.

    Args:
        hidden: [T, D], unit stride within a row.
        residual: As `hidden`, or None where `hidden` is the whole stream. Shares no memory with `hidden`.
        tables: Numbers of the site, of the type of `hidden`.
        plan: Of this step; T must not be smaller than the rows it names.
        config: Launch shape; by default the tuned one.
        num_programs: Of the grid; by default a constant for the device.

    Raises:
        ValueError: A shape, type or stride is not served.
    """
    _require_served(hidden, residual, tables)
    width = hidden.shape[1]
    if config is None:
        config = block_delta_config(width, tables.rank, hidden.shape[0], is_amd=torch.version.hip is not None)
    if num_programs is None:
        num_programs = config.programs_per_sm * _num_multiprocessors(hidden.device)
    streamed = hidden if residual is None else residual
    block_delta_kernel[(num_programs,)](
        hidden,
        streamed,
        tables.down,
        tables.bias,
        tables.up,
        tables.ranks,
        plan.header,
        plan.tiles,
        plan.rows,
        hidden.stride(0),
        streamed.stride(0),
        **constants(tables.rank, width, config, has_residual=residual is not None, dtype=hidden.dtype),
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _require_served(hidden: torch.Tensor, residual: torch.Tensor | None, tables: BlockTables) -> None:
    if hidden.ndim != 2 or hidden.shape[1] != tables.width or hidden.stride(1) != 1:
        raise ValueError(f"hidden is {tuple(hidden.shape)}, strides {hidden.stride()}; tables are {tables.width} wide")
    if hidden.dtype != tables.down.dtype or hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"hidden is {hidden.dtype}, tables are {tables.down.dtype}")
    if tables.rank > MAX_RANK:
        raise ValueError(f"tables are of rank {tables.rank}; ranks up to {MAX_RANK} are served")
    if residual is None:
        return
    if residual.shape != hidden.shape or residual.dtype != hidden.dtype or residual.stride(1) != 1:
        raise ValueError(f"residual is {tuple(residual.shape)} {residual.dtype}, strides {residual.stride()}")


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
