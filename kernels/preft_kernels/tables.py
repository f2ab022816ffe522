"""The numbers of block-output sites on a device: one table for each site, one row of it for each slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockTables:
    """Numbers of one site for all slots. A slot's rank may be smaller than the table's; what lies beyond is not read.

    Attributes:
        down: [slots, rank, width], contiguous.
        bias: [slots, rank].
        up: [slots, rank, width]: `up` transposed, scale folded in.
        ranks: [slots] int32; 0 where the slot's adapter has nothing at this site.
    """

    down: torch.Tensor
    bias: torch.Tensor
    up: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, rank: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> BlockTables:
        """Empty tables: every slot has rank 0."""
        return cls(
            torch.zeros(num_slots, rank, width, dtype=dtype, device=device),
            torch.zeros(num_slots, rank, dtype=dtype, device=device),
            torch.zeros(num_slots, rank, width, dtype=dtype, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
        )

    @property
    def num_slots(self) -> int:
        """Slots."""
        return self.down.shape[0]

    @property
    def rank(self) -> int:
        """Largest rank of a slot."""
        return self.down.shape[1]

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.down.shape[2]

    def set(self, slot: int, down: torch.Tensor, bias: torch.Tensor | None, up: torch.Tensor) -> None:
        """Fills one slot.

        Args:
            slot: Its number.
            down: [r, width].
            bias: [r], or None for zeros.
            up: [r, width].

        Raises:
            ValueError: A shape does not fit the table.
        """
        rank = down.shape[0]
        if rank > self.rank or down.shape != (rank, self.width) or up.shape != down.shape:
            raise ValueError(f"down {tuple(down.shape)}, up {tuple(up.shape)} in a table of {self.rank} x {self.width}")
        if bias is not None and bias.shape != (rank,):
            raise ValueError(f"bias {tuple(bias.shape)} for rank {rank}")
        self.down[slot, :rank].copy_(down, non_blocking=True)
        self.up[slot, :rank].copy_(up, non_blocking=True)
        if bias is None:
            self.bias[slot, :rank] = 0
        else:
            self.bias[slot, :rank].copy_(bias, non_blocking=True)
        self.ranks[slot] = rank

    def clear(self, slot: int) -> None:
        """Empties one slot. Its old numbers stay in memory and are never read."""
        self.ranks[slot] = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.down.nbytes + self.bias.nbytes + self.up.nbytes + self.ranks.nbytes
