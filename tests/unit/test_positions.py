"""The rule, against brute force and against the real pyreft."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preft.errors import UsageError
from preft.positions import ALL, PROMPT, UNBOUNDED, Policy, clip, resolve_boundary

TEXTS = ["prompt", "all", "f1", "l1", "f3", "l4", "f1+l1", "f3+l3", "f2+l7", "f100+l100"]
policies = st.one_of(
    st.sampled_from([PROMPT, ALL]),
    st.builds(Policy, st.just("ends"), st.integers(0, 9), st.integers(0, 9)).filter(lambda p: p.first + p.last > 0),
)


def brute_force(policy: Policy, boundary: int, position: int) -> bool:
    """The rule in the words of its definition, one position at a time."""
    if policy.name == "all":
        return True
    if position >= boundary:
        return False
    if policy.name == "prompt":
        return True
    first, last = min(policy.first, boundary // 2), min(policy.last, boundary // 2)
    return position < first or position >= boundary - last


@given(policies, st.integers(0, 24))
def test_spans_are_sorted_disjoint_non_empty_and_equal_brute_force(policy: Policy, boundary: int) -> None:
    spans = policy.spans(boundary)
    assert all(start < stop for start, stop in spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))
    for position in range(boundary + 8):
        expected = brute_force(policy, boundary, position)
        assert policy.is_adapted(boundary, position) == expected
        assert any(start <= position < stop for start, stop in spans) == expected


@given(policies, st.integers(0, 24), st.integers(0, 30), st.integers(0, 12))
def test_masks_and_relative_spans_equal_brute_force(policy: Policy, boundary: int, start: int, length: int) -> None:
    stop = start + length
    expected = [brute_force(policy, boundary, position) for position in range(start, stop)]
    assert policy.mask(boundary, start, stop) == expected
    inside = policy.within(boundary, start, stop)
    flags = [any(low <= index < high for low, high in inside) for index in range(length)]
    assert flags == expected
    assert all(0 <= low < high <= length for low, high in inside)


@given(policies, st.integers(0, 24))
def test_adapted_until_is_one_past_the_last(policy: Policy, boundary: int) -> None:
    adapted = [position for position in range(64) if brute_force(policy, boundary, position)]
    if policy.name == "all":
        assert policy.adapted_until(boundary) == UNBOUNDED
    else:
        assert policy.adapted_until(boundary) == (max(adapted) + 1 if adapted else 0)
        assert policy.adapted_until(boundary) <= boundary


@given(policies, st.integers(0, 24), st.lists(st.integers(1, 6), max_size=8))
def test_chunks_do_not_change_the_rule(policy: Policy, boundary: int, chunks: list[int]) -> None:
    """Whatever the split into steps, the same positions are adapted: one-token chunks and recomputation included."""
    whole = policy.mask(boundary, 0, sum(chunks))
    at, pieces = 0, []
    for chunk in chunks:
        pieces += policy.mask(boundary, at, at + chunk)
        at += chunk
    assert pieces == whole


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("boundary", [0, 1, 2, 3, 5, 8, 200, 201])
def test_clamping_is_pyrefts(text: str, boundary: int) -> None:
    if text in ("prompt", "all"):
        return
    dataset = pytest.importorskip("pyreft.dataset")
    locations = dataset.get_intervention_locations(
        last_position=boundary, positions=text, num_interventions=2, pad_mode="first"
    )
    # Padding is -1; with two ends pyreft gives one list to each half of the interventions.
    expected = {position for positions in locations for position in positions if position >= 0}
    policy = Policy.parse(text)
    assert {position for position in range(boundary + 5) if policy.is_adapted(boundary, position)} == expected


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trip(text: str) -> None:
    assert str(Policy.parse(text)) == text
    assert Policy.parse(text).is_prompt_only == (text != "all")


@pytest.mark.parametrize(
    "text", ["", "f0", "l0", "f0+l0", "f1+", "+l1", "l1+f1", "f1l1", "F1", "f-1", "f1.5", "f 1", "Prompt", "f١", "f1\n"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Policy.parse(text)
    assert "fN+lM" in (caught.value.accepted or "")


@pytest.mark.parametrize("value", [None, 3, ["prompt"]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(UsageError):
        Policy.parse(value)  # type: ignore[arg-type]


def test_last_prompt_token_is_adapted_and_the_first_output_token_is_not() -> None:
    assert PROMPT.is_adapted(5, 4)
    assert not PROMPT.is_adapted(5, 5)
    assert Policy.parse("l1").spans(5) == ((4, 5),)


def test_clip_is_relative() -> None:
    assert clip(((0, 4), (9, 12)), 2, 10) == ((0, 2), (7, 8))
    assert clip(((0, 4),), 4, 8) == ()


@pytest.mark.parametrize(("requested", "expected"), [(None, 7), (0, 0), (3, 3), (7, 7)])
def test_boundary(requested: int | None, expected: int) -> None:
    assert resolve_boundary(7, requested) == expected


@pytest.mark.parametrize("requested", [-1, 8, "3", 2.5, True, [3]])
def test_b3_boundaries_that_are_refused(requested: object) -> None:
    with pytest.raises(UsageError, match="boundary") as caught:
        resolve_boundary(7, requested)
    assert "7 tokens" in str(caught.value)
