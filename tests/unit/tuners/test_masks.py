"""Masks as tensors against the rule, position by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preft.errors import UnsupportedError
from preft.positions import Policy
from preft.tuners.masks import ALL_ADAPTED, NONE_ADAPTED, StepMask, batch_mask
from tests.helpers.oracle import is_adapted

POLICIES = ("prompt", "all", "f1", "l1", "f3+l2", "f40+l40")


@given(
    st.sampled_from(POLICIES),
    st.sampled_from(["left", "right"]),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_a_padded_batch_follows_the_rule(positions: str, side: str, rows: list[tuple[int, int]]) -> None:
    width = max(length for length, _ in rows)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    want = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (length, boundary) in enumerate(rows):
        start = width - length if side == "left" else 0
        attention[index, start : start + length] = 1
        for position in range(length):
            want[index, start + position] = is_adapted(positions, boundary, position)
    got = batch_mask(Policy.parse(positions), [boundary for _, boundary in rows], attention)
    assert torch.equal(got, want)


def test_flags_of_a_step() -> None:
    mask = torch.tensor([[True, False, False]])
    assert StepMask.of(mask & False) is NONE_ADAPTED
    assert StepMask.of(mask | True) is ALL_ADAPTED
    step = StepMask.of(mask)
    assert step.any
    assert step.window(0) is step
    assert step.window(1) is NONE_ADAPTED
    assert step.window(torch.tensor([0])) is ALL_ADAPTED


def test_only_adapted_tokens_keep_their_values() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    low = torch.randn(2, 2, 3)
    low[0, 1, 0] = float("inf")
    got = StepMask.of(mask).only(low)
    assert torch.equal(got[mask], low[mask])
    assert not got[~mask].any(), "zero even where the update would have overflowed"
    assert torch.equal(StepMask.of(mask).only(low.flatten(0, 1)), got.flatten(0, 1))
    assert ALL_ADAPTED.only(low) is low
    for shape in ((3, 3), (4, 1, 3), (2, 3, 3)):
        with pytest.raises(UnsupportedError, match="in their order"):
            StepMask.of(mask).only(torch.zeros(shape))
