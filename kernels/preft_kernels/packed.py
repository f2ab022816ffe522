"""The numbers of one adapter at one module, joined so that one product serves all its parts.

Models fuse projections: q, k and v are one module with three output ranges. The `down` matrices of its parts are
stacked into one, so that the input is read once; each part's `up` writes its own range of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class UpPart:
    """One part's way back to the output.

    Attributes:
        column: First output column.
        rank_start: First row of the joined `down` that belongs to it.
        up_t: [rank, width], contiguous; scale folded in.
    """

    column: int
    rank_start: int
    up_t: torch.Tensor

    @property
    def rank_stop(self) -> int:
        """One past its last row of the joined `down`."""
        return self.rank_start + self.up_t.shape[0]

    @property
    def column_stop(self) -> int:
        """One past its last output column."""
        return self.column + self.up_t.shape[1]


@dataclass(frozen=True)
class PackedSite:
    """One adapter at one module.

    Attributes:
        down_t: [d_in, sum of ranks], contiguous.
        bias: [sum of ranks], or None.
        parts: Where the update goes.
        signature: Equal for two sites whose updates can be one batched product.
    """

    down_t: torch.Tensor
    bias: torch.Tensor | None
    parts: tuple[UpPart, ...]
    signature: tuple[int, ...]

    @classmethod
    def build(cls, down_t: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[UpPart]) -> PackedSite:
        """Joins the parts and derives the signature."""
        layout = [number for part in parts for number in (part.column, part.column_stop, part.rank_stop)]
        return cls(down_t, bias, tuple(parts), (down_t.shape[1], int(bias is not None), *layout))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.down_t.nbytes + bias + sum(part.up_t.nbytes for part in self.parts)
