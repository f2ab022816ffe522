"""The picture of an evaluation."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from preft.errors import FileError
from preft.eval.pairing import compare_arms
from preft.eval.plots import NAMES, _panels, has_matplotlib, save_effects

pytest.importorskip("matplotlib")


def sample(index: int, exact: float, ratio: float) -> dict[str, object]:
    return {"doc_id": index, "doc_hash": f"d{index}", "filter": "none", "metrics": ["exact", "log_ratio"],
            "exact": exact, "log_ratio": ratio}  # fmt: skip


@pytest.fixture
def comparisons() -> list:
    first = [sample(index, 0.0, index % 3) for index in range(30)]
    second = [sample(index, float(index < 20), index % 3 + 1 + index % 2) for index in range(30)]
    rows, _ = compare_arms(("base", "mine"), {"t": first}, {"t": second}, higher_is_better={"t": {"log_ratio": None}})
    return rows


def test_each_effect_has_its_place(comparisons: list, tmp_path: Path) -> None:
    assert has_matplotlib()
    assert [row.verdict for row in comparisons] == ["better", "higher"]
    assert {title: len(rows) for title, rows in _panels(comparisons).items()} == {
        "share of examples, or pass@k": 1, "log_ratio": 1,
    }  # fmt: skip
    paths = save_effects(comparisons, tmp_path)
    assert [path.name for path in paths] == list(NAMES)
    assert struct.unpack(">II", paths[0].read_bytes()[16:24]) > (1000, 300)
    text = paths[1].read_text()
    for words in ("mine - base", "t, exact, n = 30", "better", "higher", "difference with 95 % interval: log_ratio"):
        assert words in text
    assert save_effects(comparisons, tmp_path)[1].read_text() == text


def test_nothing_to_show_and_nowhere_to_write(comparisons: list, tmp_path: Path) -> None:
    assert save_effects([], tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileError, match="cannot be written"):
        save_effects(comparisons, tmp_path / "absent")
