"""Pairs are made by example, whatever the order (cases D2)."""

from __future__ import annotations

from typing import Any

import pytest

from preft.eval.pairing import compare_arms


def sample(index: int, value: Any, *, doc: str | None = None, kind: str = "none") -> dict[str, Any]:
    return {"doc_id": index, "doc_hash": doc or f"d{index}", "filter": kind, "metrics": ["acc"], "acc": value}


def test_order_does_not_matter() -> None:
    first = [sample(index, float(index % 2)) for index in range(40)]
    second = [sample(index, 1.0) for index in reversed(range(40))]
    (row,), skipped = compare_arms(("base", "mine"), {"t": first}, {"t": second})
    assert (row.paired.num_pairs, row.paired.higher, row.paired.lower) == (40, 20, 0)
    assert row.verdict == "better"
    assert skipped == []


def test_what_is_not_paired_is_listed() -> None:
    first = [sample(index, 1.0) for index in range(10)]
    second = [sample(index, 1.0, doc="other" if index == 3 else None) for index in range(9)]
    second[5]["acc"] = float("inf")
    (row,), _ = compare_arms(("a", "b"), {"t": first}, {"t": second}, failed={("t", 4)})
    assert row.left_out == {
        "another example of the same number": (3,),
        "failed": (4,),
        "not a finite number": (5,),
        "only in one arm": (9,),
    }
    assert row.paired.num_pairs == 6
    assert row.to_dict()["left_out"]["failed"] == [4]


def test_the_correction_is_over_all_rows_of_two_arms() -> None:
    tasks = {name: [sample(index, 0.0) for index in range(8)] for name in "abcd"}
    better = {name: [sample(index, float(index < 7)) for index in range(8)] for name in "abcd"}
    rows, _ = compare_arms(("x", "y"), tasks, better)
    assert [row.paired.p_value for row in rows] == pytest.approx([0.015625] * 4)
    assert [row.adjusted for row in rows] == pytest.approx([0.0625] * 4)
    assert {row.verdict for row in rows} == {"cannot tell"}


def test_a_lower_metric_may_be_the_better_one() -> None:
    first, second = [[sample(index, value) for index in range(20)] for value in (1.0, 0.0)]
    (row,), _ = compare_arms(("x", "y"), {"t": first}, {"t": second}, higher_is_better={"t": {"acc": False}})
    assert row.verdict == "better"


def test_filters_are_kept_apart_and_aggregates_are_named() -> None:
    first = [sample(0, 1.0, kind=kind) for kind in ("strict", "loose")]
    rows, _ = compare_arms(("x", "y"), {"t": first}, {"t": first})
    assert [row.filter for row in rows] == ["loose", "strict"]
    whole = [sample(0, (-3.0, 4))]
    rows, skipped = compare_arms(("x", "y"), {"t": whole}, {"t": whole})
    assert rows == []
    assert skipped == ["t acc: it does not give one number an example"]
