"""Launch shapes by device, width and rank. Estimates until `benchmarks/gpu_check.py` has measured them on a GPU.

What is known without one (compiled code, `tests/kernels/test_aot.py`): no shape here spills, and each fits the shared
memory of its chips. The work is bound by memory traffic at every rank in range, so tensor-core width does not matter;
what matters is the number of bytes in flight and that the last wave of tiles is short. Hence 32 rows a tile where there
are many, 16 where there are few, and a grid of a few programs on each multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from preft_kernels.segments import TILE_ROWS

MAX_RANK = 128
"""Largest rank of a table: beyond it the inner products of a tile no longer fit into registers."""

FEW_ROWS = 2048
"""Up to this many tokens in a batch, 32-row tiles would leave multiprocessors idle."""


@dataclass(frozen=True)
class BlockDeltaConfig:
    """Launch shape of `block_delta`.

    Attributes:
        rows: Of the part of a tile that a program works on at once; a power of two, at least 16.
        columns_in: Columns of the stream read at once in the first pass.
        columns_out: Columns written at once in the second.
        stages: Depth of the load pipeline.
        warps: Of a program.
        programs_per_sm: Of the constant grid.
    """

    rows: int
    columns_in: int
    columns_out: int
    stages: int = 3
    warps: int = 4
    programs_per_sm: int = 4

    def __post_init__(self) -> None:
        if self.rows < 16 or TILE_ROWS % self.rows:
            raise ValueError(f"rows must divide {TILE_ROWS} and be at least 16: {self.rows}")


def padded_rank(rank: int) -> int:
    """Rank as the matrix units want it: a power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


def block_delta_config(width: int, rank: int, num_tokens: int, *, is_amd: bool = False) -> BlockDeltaConfig:
    """The launch shape for a site.

    Args:
        width: Of the residual stream.
        rank: Of the table, not of an adapter.
        num_tokens: Rows of the batch. Under CUDA graphs it is the padded number, which is constant for a graph.
        is_amd: For AMD GPUs, whose shared memory is 64 KiB.
    """
    padded = padded_rank(rank)
    columns_in = 64 if padded >= 64 else 128
    columns_out = 64 if is_amd or padded >= 128 else 128
    rows = 16 if num_tokens <= FEW_ROWS else 32
    if is_amd and columns_in == 64:
        rows = 32  # fewer would leave each thread four values to load, half of the widest access
    return BlockDeltaConfig(rows, columns_in, columns_out, stages=2 if is_amd else 3)


def candidates(width: int, rank: int, *, is_amd: bool = False) -> list[BlockDeltaConfig]:
    """Shapes worth measuring on a GPU; the first is the one in use for large batches."""
    base = block_delta_config(width, rank, FEW_ROWS + 1, is_amd=is_amd)
    return [
        BlockDeltaConfig(rows, base.columns_in, base.columns_out, base.stages, base.warps, programs)
        for rows in (32, 16, 64)
        for programs in (4, 2, 1)
    ]
