"""Batches for the block-output update, the exact answer, and the check that every implementation must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from preft_kernels.rows import Segment
from preft_kernels.segments import PlanBuffer, RowPlan, plan_rows
from preft_kernels.tables import BlockTables
from preft_kernels.tolerances import error_bound

Run = Callable[[torch.Tensor, "torch.Tensor | None", BlockTables, PlanBuffer], object]
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 70)


@dataclass(frozen=True)
class Case:
    """One batch.

    Attributes:
        width: Of the stream.
        ranks: Of the slots; 0 for a slot without numbers here.
        dtype: Of everything.
        pattern: `ragged`, `empty`, `one`, `whole` (all rows under one slot), `each` (every row its own slot in turn).
        num_rows: Of the batch.
        padding: Extra columns beside the stream in memory: then its rows are not adjacent.
        has_residual: Whether the stream is in two parts.
    """

    width: int
    ranks: tuple[int, ...]
    dtype: torch.dtype
    pattern: str = "ragged"
    num_rows: int = 120
    padding: int = 0
    has_residual: bool = True

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        ranks = "-".join(map(str, self.ranks))
        extra = "-strided" * bool(self.padding) + "-single" * (not self.has_residual)
        return f"{self.pattern}-{self.width}-r{ranks}-{kind}-{self.num_rows}{extra}"


@dataclass(frozen=True)
class Batch:
    """A case's tensors.

    Attributes:
        backing: What `hidden` is a view of.
        hidden: [T, D].
        residual: [T, D], or None.
        tables: Numbers; poisoned with NaN wherever nothing may read.
        plan: Rows.
        slots: [T] int: the slot of each row or -1, straight from the segments and not from the plan.
    """

    backing: torch.Tensor
    hidden: torch.Tensor
    residual: torch.Tensor | None
    tables: BlockTables
    plan: RowPlan
    slots: np.ndarray


def segments_of(case: Case, rng: np.random.Generator) -> list[Segment]:
    """The case's segments; slot `len(ranks) - 1` is left out of ragged ones so that it can be poisoned."""
    slots, total = len(case.ranks), case.num_rows
    if case.pattern == "empty":
        return []
    if case.pattern == "one":
        return [Segment(total // 2, 1, slots - 1)]
    if case.pattern == "whole":
        return [Segment(0, total, 0)]
    if case.pattern == "each":
        return [Segment(row, 1, row % slots) for row in range(total)]
    segments, row = [], 0
    while row < total:
        length = min(int(rng.choice(LENGTHS)), total - row)
        if rng.random() > 0.3:
            segments.append(Segment(row, length, int(rng.integers(0, max(1, slots - 1)))))
        row += length
    return segments


def build(case: Case, device: str = "cpu") -> Batch:
    """Draws the case's numbers: seeded by the case itself."""
    seed = [case.width, case.num_rows, *case.ranks]
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    backing = draw(case.num_rows, case.width + case.padding).to(case.dtype)
    residual = (3 * draw(case.num_rows, case.width + case.padding)).to(case.dtype)
    segments = segments_of(case, rng)
    slots = np.full(case.num_rows, -1)
    for segment in segments:
        slots[segment.start : segment.start + segment.length] = segment.slot
    planned = torch.from_numpy(slots >= 0)
    backing[~planned] = torch.nan
    residual[~planned] = torch.nan
    backing, residual = backing.to(device), residual.to(device)
    tables = BlockTables.allocate(len(case.ranks), max(case.ranks), case.width, case.dtype, device)
    for table in (tables.down, tables.bias, tables.up):
        table.fill_(torch.nan)
    used = {segment.slot for segment in segments}
    for slot, rank in enumerate(case.ranks):
        if rank and slot in used:
            down, up = draw(rank, case.width) / case.width**0.5, draw(rank, case.width) / rank**0.5
            tables.set(slot, down, draw(rank), up)
    left = case.padding // 2
    view = slice(left, left + case.width)
    second = residual[:, view] if case.has_residual else None
    return Batch(backing, backing[:, view], second, tables, plan_rows(segments), slots)


def exact(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(updates, outputs), [T, D] float64, one row at a time; zero updates at rows that are not planned."""
    hidden = batch.hidden.double().cpu()
    stream = hidden if batch.residual is None else hidden + batch.residual.double().cpu()
    tables = batch.tables
    updates = torch.zeros_like(hidden)
    for row, slot in enumerate(batch.slots):
        rank = int(tables.ranks[slot]) if slot >= 0 else 0
        if rank:
            down, bias, up = (table[slot, :rank].double().cpu() for table in (tables.down, tables.bias, tables.up))
            updates[row] = (down @ stream[row] + bias) @ up
    return updates, hidden + updates


def check(run: Run, case: Case, device: str = "cpu") -> float:
    """Runs one case and raises `AssertionError` if anything is off.

    Returns:
        The error as a share of its bound.
    """
    batch = build(case, device)
    updates, outputs = exact(batch)
    before = batch.backing.clone()
    buffer = PlanBuffer(case.num_rows, len(case.ranks), device)
    # What an earlier, larger step may have left: legal, and wrong for this one.
    buffer.upload(plan_rows([Segment(0, case.num_rows, len(case.ranks) - 1)]))
    buffer.upload(batch.plan)
    run(batch.hidden, batch.residual, batch.tables, buffer)
    ranks = batch.tables.ranks.tolist()
    touched = torch.tensor([bool(slot >= 0 and ranks[slot] > 0) for slot in batch.slots])
    inside = torch.zeros_like(before, dtype=torch.bool)
    left = case.padding // 2
    inside[touched.to(device), left : left + case.width] = True
    same = _bits(batch.backing) == _bits(before)
    assert bool(same[~inside].all()), "a value outside of the planned rows was written"
    if not touched.any():
        return 0.0
    difference = batch.hidden.double().cpu()[touched] - outputs[touched]
    bound = error_bound(updates[touched], outputs[touched], case.dtype)
    size = float(updates[touched].norm())
    assert size > 20 * bound, f"the bound {bound:.3g} cannot tell an update of {size:.3g} from none"
    error = float(difference.norm())
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}, update {size:.3g}"
    return error / bound


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

SMALL = [
    Case(48, (3, 0, 16, 5, 7), F32, num_rows=150),
    Case(48, (3, 16, 5), BF16, padding=16),
    Case(160, (4, 20, 2, 1), F16, "each", num_rows=40),
    Case(64, (2, 9), F32, "whole", num_rows=131),
    Case(64, (2, 9), F32, "one", num_rows=9, has_residual=False),
    Case(64, (2, 9), BF16, "empty", num_rows=9),
]
"""Enough to kill every mutant that can be killed here."""

WIDE = [
    Case(576, (1, 4, 128, 16, 8), BF16),
    Case(576, (4, 4), F32, padding=48),
    Case(896, (8, 32, 1), F16, num_rows=80),
    Case(1000, (12, 5), BF16, num_rows=70, has_residual=False),
    Case(4096, (128, 8, 64), BF16, num_rows=48),
    Case(4096, (16, 16), F32, num_rows=40),
    Case(8192, (8, 64, 2), BF16, num_rows=40),
]
