"""The row plan of a step on a device: which rows of the batch each slot acts on, in buffers that never move.

Rows are sorted by slot and cut into tiles of at most `TILE_ROWS` rows of one slot. Tiles of one slot are adjacent, so
that its numbers stay in the cache while they are used. The plan is built on the host from segments, without asking the
device anything, and goes over in one copy. Its buffers keep their addresses and their size, so a captured graph can be
replayed with any number of rows, none included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from preft_kernels.rows import Segment

if TYPE_CHECKING:
    import torch

TILE_ROWS = 64
"""Rows of a planned tile. A kernel may work on any power of two up to this many at once, see `block_delta`."""

TILE_FIELDS = 3
"""A tile is (slot, first, length); `first` counts in the sorted rows."""

_HEADER = 16
"""Integers in front: the number of tiles, the number of rows, zeros. 64 bytes, so that what follows is aligned."""


@dataclass(frozen=True)
class RowPlan:
    """Planned rows of one step, on the host.

    Attributes:
        rows: [P] int32, unique rows of the batch, sorted by slot.
        tiles: [N, 3] int32: slot, first index into `rows`, number of rows.
        num_slots: Distinct slots.
        longest: Rows of the slot that has most.
    """

    rows: np.ndarray
    tiles: np.ndarray
    num_slots: int
    longest: int

    @property
    def num_rows(self) -> int:
        """Planned rows."""
        return len(self.rows)

    @property
    def num_tiles(self) -> int:
        """Tiles."""
        return len(self.tiles)

    def slot_of_row(self, num_rows: int) -> np.ndarray:
        """[num_rows] int32: the slot of each row of the batch, or -1."""
        slots = np.full(num_rows, -1, np.int32)
        for slot, first, length in self.tiles:
            slots[self.rows[first : first + length]] = slot
        return slots


EMPTY_PLAN = RowPlan(np.zeros(0, np.int32), np.zeros((0, TILE_FIELDS), np.int32), 0, 0)


def plan_rows(segments: Iterable[Segment], tile_rows: int = TILE_ROWS) -> RowPlan:
    """Plans a step.

    Args:
        segments: Adjacent rows under one slot each, in any order; a slot may have several.
        tile_rows: Most rows of a tile.

    Raises:
        ValueError: A segment is empty, has a negative start or slot, or two of them share a row: two tiles would then
            update one row at the same time, and an update would be lost or added twice.
    """
    table = np.array([(s.start, s.length, s.slot) for s in segments], np.int64).reshape(-1, 3)
    if not len(table):
        return EMPTY_PLAN
    _require_disjoint(table)
    starts, lengths, slots = table[np.argsort(table[:, 2], kind="stable")].T
    before = np.cumsum(lengths) - lengths
    rows = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    heads = np.flatnonzero(np.diff(slots, prepend=-1))
    slot_first, slot_rows = before[heads], np.add.reduceat(lengths, heads)
    tiles_of_slot = -(-slot_rows // tile_rows)
    owner = np.repeat(np.arange(len(heads)), tiles_of_slot)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(tiles_of_slot) - tiles_of_slot, tiles_of_slot)
    tiles = np.stack(
        [slots[heads][owner], slot_first[owner] + place * tile_rows, slot_rows[owner] - place * tile_rows], axis=1
    )
    tiles[:, 2] = np.minimum(tiles[:, 2], tile_rows)
    return RowPlan(rows.astype(np.int32), tiles.astype(np.int32), len(heads), int(slot_rows.max()))


def _require_disjoint(table: np.ndarray) -> None:
    if (table[:, 1] < 1).any() or (table[:, (0, 2)] < 0).any():
        raise ValueError(f"a segment is empty, or starts or is numbered below zero: {table.tolist()[:8]}")
    by_start = table[np.argsort(table[:, 0], kind="stable")]
    if (by_start[1:, 0] < by_start[:-1, 0] + by_start[:-1, 1]).any():
        raise ValueError(f"two segments share a row: {by_start.tolist()[:8]}")


def max_tiles(max_rows: int, max_slots: int, tile_rows: int = TILE_ROWS) -> int:
    """Most tiles that any plan of this size can have: full ones, and one ragged one for each slot."""
    return max(1, max_rows // tile_rows + min(max_slots, max_rows))


class PlanBuffer:
    """A plan's place on a device: one allocation, made once, that kernels and captured graphs hold on to.

    Args:
        max_rows: Rows of the largest batch.
        max_slots: Slots.
        device: Where it lies.
        num_staging: Host buffers used in turn. A copy may still be under way while the next step is prepared; the
            host waits only if it is a whole turn ahead.

    Attributes:
        header: [16] int32; the first is the number of tiles, the second the number of rows.
        tiles: [max_tiles, 3] int32.
        rows: [max_rows] int32.
        plan: What was uploaded last.
    """

    def __init__(self, max_rows: int, max_slots: int, device: torch.device | str, num_staging: int = 3) -> None:
        import torch

        self.max_rows, self.max_slots = max_rows, max_slots
        self.max_tiles = max_tiles(max_rows, max_slots)
        self._rows_at = _HEADER + -(-self.max_tiles * TILE_FIELDS // _HEADER) * _HEADER
        size = self._rows_at + max_rows
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu) for _ in range(num_staging)]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(num_staging)]
        self._turn = 0
        self.header = self._device[:_HEADER]
        self.tiles = self._device[_HEADER : _HEADER + self.max_tiles * TILE_FIELDS].view(-1, TILE_FIELDS)
        self.rows = self._device[self._rows_at :]
        self.plan = EMPTY_PLAN

    def upload(self, plan: RowPlan) -> None:
        """Makes `plan` the one that kernels launched, or replayed, after this call on the same stream work on.

        Raises:
            ValueError: It does not fit: a row, a slot or the number of tiles is beyond the buffer.
        """
        if plan.num_rows and (
            plan.rows.max() >= self.max_rows or plan.tiles[:, 0].max() >= self.max_slots
        ):  # a kernel would read and write outside of its tensors
            raise ValueError(f"the plan has rows or slots beyond {self.max_rows} rows and {self.max_slots} slots")
        if plan.num_tiles > self.max_tiles:
            raise ValueError(f"the plan has {plan.num_tiles} tiles; the buffer holds {self.max_tiles}")
        self._turn = (self._turn + 1) % len(self._staging)
        staging, copied = self._staging[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        host = staging.numpy()
        host[0], host[1] = plan.num_tiles, plan.num_rows
        host[_HEADER : _HEADER + plan.tiles.size] = plan.tiles.reshape(-1)
        host[self._rows_at : self._rows_at + plan.num_rows] = plan.rows
        used = self._rows_at + plan.num_rows
        self._device[:used].copy_(staging[:used], non_blocking=True)
        if copied is not None:
            copied.record()
        self.plan = plan
