"""The row plan: every planned row in exactly one tile, in buffers that stay where they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preft_kernels.rows import Segment
from preft_kernels.segments import EMPTY_PLAN, TILE_ROWS, PlanBuffer, max_tiles, plan_rows


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """Disjoint segments in any order, and the number of rows."""
    row, segments = 0, []
    for gap, length, slot in draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200), st.integers(0, 9)), max_size=12)
    ):
        segments.append(Segment(row + gap, length, slot))
        row += gap + length
    return draw(st.permutations(segments)), row + draw(st.integers(0, 3))


@given(batches(), st.sampled_from([16, 64]))
def test_a_plan_holds_every_row_once_under_its_slot(batch: tuple[list[Segment], int], tile_rows: int) -> None:
    segments, num_rows = batch
    plan = plan_rows(segments, tile_rows)
    wanted = np.full(num_rows, -1)
    for segment in segments:
        wanted[segment.start : segment.start + segment.length] = segment.slot
    assert plan.slot_of_row(num_rows).tolist() == wanted.tolist()
    assert len(set(plan.rows.tolist())) == plan.num_rows == (wanted >= 0).sum()
    covered = [index for _, first, length in plan.tiles for index in range(first, first + length)]
    assert covered == list(range(plan.num_rows))
    assert all(0 < length <= tile_rows for length in plan.tiles[:, 2])
    assert plan.tiles[:, 0].tolist() == sorted(plan.tiles[:, 0].tolist())
    counts = np.unique(wanted[wanted >= 0], return_counts=True)[1]
    assert (plan.num_slots, plan.longest) == (len(counts), max(counts, default=0))
    assert plan.num_tiles == sum(-(-count // tile_rows) for count in counts)
    assert plan.num_tiles <= max_tiles(num_rows, 10, tile_rows)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 5, 1), Segment(4, 2, 2)], "share a row"),
        ([Segment(6, 2, 1), Segment(0, 7, 1)], "share a row"),
        ([Segment(0, 0, 1)], "empty"),
        ([Segment(-1, 3, 1)], "below zero"),
        ([Segment(0, 3, -1)], "below zero"),
    ],
)
def test_what_two_programs_would_fight_over_is_refused(segments: list[Segment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_rows(segments)


def test_a_buffer_keeps_its_place() -> None:
    buffer = PlanBuffer(300, 4, "cpu", num_staging=2)
    places = [tensor.data_ptr() for tensor in (buffer.header, buffer.tiles, buffer.rows)]
    assert all((place - places[0]) % 64 == 0 for place in places), "what follows the header is not aligned"
    for segments in ([Segment(0, 300, 3)], [Segment(7, 3, 1), Segment(20, 1, 0)], [], [Segment(299, 1, 2)]):
        plan = plan_rows(segments)
        buffer.upload(plan)
        assert buffer.header.tolist() == [plan.num_tiles, plan.num_rows, *[0] * 14]
        assert buffer.tiles[: plan.num_tiles].tolist() == plan.tiles.tolist()
        assert buffer.rows[: plan.num_rows].tolist() == plan.rows.tolist()
        assert buffer.plan is plan
    assert places == [tensor.data_ptr() for tensor in (buffer.header, buffer.tiles, buffer.rows)]


def test_the_fullest_plan_fits_and_the_next_does_not() -> None:
    slots, rows = 5, 3 * TILE_ROWS + 5
    segments = [Segment(0, 3 * TILE_ROWS + 1, 0), *[Segment(3 * TILE_ROWS + slot, 1, slot) for slot in range(1, slots)]]
    plan = plan_rows(segments)
    buffer = PlanBuffer(rows, slots, "cpu")
    assert plan.num_tiles == buffer.max_tiles == 8
    buffer.upload(plan)
    for beyond in ([Segment(rows, 1, 0)], [Segment(0, 1, slots)]):
        with pytest.raises(ValueError, match="beyond"):
            buffer.upload(plan_rows(beyond))
    assert plan_rows([]) is EMPTY_PLAN


def test_one_copy_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    copies = []
    plain = torch.Tensor.copy_

    def counted(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        copies.append(kwargs)
        return plain(self, *args, **kwargs)  # type: ignore[arg-type]

    buffer = PlanBuffer(64, 2, "cpu")
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    buffer.upload(plan_rows([Segment(0, 64, 1)]))
    assert copies == [{"non_blocking": True}]


def test_staging_is_not_reused_before_a_whole_turn() -> None:
    buffer = PlanBuffer(64, 2, "cpu", num_staging=3)
    used = []
    for row in range(6):
        buffer.upload(plan_rows([Segment(row, 1, 0)]))
        used.append([int(staging[buffer._rows_at]) for staging in buffer._staging])
    assert used[2] == [2, 0, 1]
    assert used[5] == [5, 3, 4]
