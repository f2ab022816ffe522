"""Truncation never leaves an example without a prompt or without anything to learn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preft.data.examples import Example, Limits, fit
from preft.errors import UsageError

PARTS = st.lists(st.integers(0, 500), min_size=1, max_size=30).map(tuple)


@given(PARTS, PARTS, st.integers(2, 40), st.booleans(), st.integers(1, 4))
def test_what_fits_is_the_end_of_the_prompt_and_the_start_of_the_completion(
    prompt: tuple[int, ...], completion: tuple[int, ...], most: int, cut: bool, least: int
) -> None:
    fitted = fit(Example(prompt, completion, "a"), Limits(most, cut_completions=cut, min_prompt_tokens=least))
    whole = len(prompt) + len(completion)
    if fitted is None:
        assert whole > most
        assert len(completion) > most - least
        assert not cut or most <= least
        return
    assert 2 <= fitted.num_tokens <= most
    assert fitted.id == "a"
    assert prompt[-fitted.boundary :] == fitted.prompt_ids
    assert completion[: len(fitted.completion_ids)] == fitted.completion_ids
    if whole <= most:
        assert fitted.num_tokens == whole
    elif not cut:
        assert fitted.completion_ids == completion
        assert fitted.num_tokens == most


def test_an_example_needs_both_parts() -> None:
    with pytest.raises(UsageError, match="no completion"):
        Example((1,), ())
    with pytest.raises(UsageError, match="no prompt"):
        Example((), (1,))
