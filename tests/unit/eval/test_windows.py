"""Truncation keeps the harness's rules and moves the boundary (cases D1)."""

from __future__ import annotations

import pytest

from preft.errors import RequestError
from preft.eval.windows import prompt_window, scoring_window


def test_the_context_is_the_boundary() -> None:
    window = scoring_window([1, 2, 3], [4, 5], 10)
    assert (window.tokens, window.boundary, window.num_scored) == ((1, 2, 3, 4, 5), 3, 2)


def test_the_boundary_moves_with_the_cut() -> None:
    """`max_length` tokens of input hold one token more of text, as the harness counts."""
    window = scoring_window(list(range(10)), [90, 91], 5)
    assert window.tokens == (6, 7, 8, 9, 90, 91)
    assert window.boundary == 4


def test_a_continuation_as_long_as_the_window_keeps_one_token_of_context() -> None:
    window = scoring_window([1, 2], [3, 4, 5], 3)
    assert (window.tokens, window.boundary) == ((2, 3, 4, 5), 1)


@pytest.mark.parametrize(("context", "continuation"), [([], [1]), ([1], []), ([1], [1, 2, 3, 4])])
def test_what_cannot_be_scored_is_refused(context: list[int], continuation: list[int]) -> None:
    with pytest.raises(RequestError):
        scoring_window(context, continuation, 3)


def test_a_named_boundary_is_kept_inside_the_window() -> None:
    assert scoring_window([1], [2, 3], 9, boundary=0).boundary == 0
    assert scoring_window([1], [2, 3], 9, boundary=99).boundary == 3


def test_prompts_keep_their_end() -> None:
    assert prompt_window(range(10), 4, 8) == (6, 7, 8, 9)
    with pytest.raises(RequestError, match="more new tokens"):
        prompt_window([1], 8, 8)
    with pytest.raises(RequestError, match="empty"):
        prompt_window([], 1, 8)
