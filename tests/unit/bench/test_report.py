"""The page holds itself together, remarks say what must be known, and regressions are found."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from preft.bench.compare import compare
from preft.bench.page import build_page, ratio_text, save_page
from preft.bench.plots import save_plots
from preft.bench.rows import read_rows
from preft.bench.summary import remarks, summarise
from preft.errors import FileError, UsageError
from tests.unit.bench.common import run_fake, spec_of

LOADING = {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "background", "ping"}


class Links(HTMLParser):
    """Everything in a page that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in LOADING]


def fetched(page: str) -> list[str]:
    links = Links()
    links.feed(page)
    inside = [value for value in links.found if not value.startswith(("#", "data:"))]
    return (
        inside
        + re.findall(r"url\((?!#)[^)]*\)|@import[^;]*", page)
        + [tag for tag in links.tags if tag in ("script", "iframe")]
    )


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    spec = spec_of(
        tmp_path / "r", adapters=(1, 8, 64), ranks=((8,), (32,)), repeats=2, arms=("base", "lora", "lorap", "direftp")
    )
    run_fake(spec)
    return read_rows(tmp_path / "r")


def test_the_page_needs_nothing_else(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    entries = summarise(rows)
    setup = {**rows[0]["setup"], "model": "org/<b>model</b>"}
    path = save_page(tmp_path, entries, ["mind <this>"], setup)
    page = path.read_text()
    assert fetched(page) == []
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "@media (prefers-color-scheme: dark)" in page
    assert "color-scheme: light dark" in page
    assert "overflow-x: auto" in page
    assert page.count("<svg") == 2  # one a rank
    assert page.count('<tr class="point">') == 3 * 6  # a line above each point in each table
    assert "currentColor" in page
    assert "mind &lt;this&gt;" in page
    assert "<b>model" not in page
    assert "direftp" in page


def test_the_search_for_requests_can_fail() -> None:
    assert fetched('<img src="https://example.org/x.png">') == ["https://example.org/x.png"]
    assert fetched("<style>@import 'x.css';</style>") == ["@import 'x.css'"]
    assert fetched("<script>1</script>") == ["script"]


def test_plots(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    entries = summarise(rows)
    png, svg = save_plots(entries, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert "adapters</text>" in svg.read_text()
    assert save_plots(summarise([row for row in rows if row["adapters"] == 8]), tmp_path) == [png, svg]
    with pytest.raises(FileError, match="cannot be written"):
        save_plots(entries, tmp_path / "nowhere")


def test_a_result_without_a_measured_arm_still_has_a_page(tmp_path: Path) -> None:
    outcome = run_fake(spec_of(tmp_path, arms=("base",), repeats=1), "fail=base")
    entries = summarise(outcome.rows)
    assert save_plots(entries, tmp_path) == []
    page = build_page(entries, remarks(outcome.rows, entries, outcome.status), outcome.setup)
    assert "No arm was measured." in page
    assert "PARTIAL" in page


def test_an_entry(rows: list[dict[str, Any]]) -> None:
    entry = next(e for e in summarise(rows) if (e["arm"], e["adapters"], e["lora_rank"]) == ("lorap", 8, 32))
    assert entry["ratio_to_base"]["ratio"] == pytest.approx(0.9)
    assert entry["ratio_to_lora"]["includes_one"] is False
    assert entry["repeats"] == 2
    assert entry["ttft_s_p95"] == 0.02
    assert entry["fairness"]["jain_index"] == 0.9
    assert ratio_text(entry["ratio_to_base"]) == "0.900 [0.900, 0.900]"
    assert ratio_text(None) == "-"
    assert ratio_text({"ratio": 1.0, "low": 0.9, "high": 1.1, "includes_one": True}).endswith("(includes 1)")


def test_remarks(rows: list[dict[str, Any]]) -> None:
    assert remarks(rows, summarise(rows), "complete") == [
        "only 4 requests a run, so not every adapter was used in each"
    ]
    one = [{**row, "adapters": 1} for row in rows if row["repeat"] == 0 and row["adapters"] == 1]
    assert remarks(one, summarise(one), "complete") == [
        "one repeat gives ratios without an interval; they may be noise"
    ]
    busy = [{**row, "other_busy_cores": 1.5, "output_len": 1} for row in rows if row["adapters"] == 1]
    said = remarks(busy, summarise(busy), "complete")
    assert said[0] == "the machine was busy: other processes used up to 1.5 cores meanwhile"
    assert said[1] == "one output token comes from prefill alone, so nothing is said about decode"
    compiled = [{**row, "engine": {"eager": row["kind"] != "base"}} for row in rows if row["adapters"] == 1]
    assert "base ran compiled, but these arms eager, as the engine decided: direftp, lora, lorap" in remarks(
        compiled, summarise(compiled), "complete"
    )


def scaled(rows: list[dict[str, Any]], factor: float, arm: str = "lorap") -> list[dict[str, Any]]:
    return [
        {**row, "output_tokens_per_s": row["output_tokens_per_s"] * (factor if row["arm"] == arm else 1)}
        for row in rows
    ]


def test_a_regression_is_found(rows: list[dict[str, Any]]) -> None:
    same = compare(rows, rows)
    assert not same.regressed
    assert len(same.changes) == 24
    assert same.differences == ()
    worse = compare(rows, scaled(rows, 0.9))
    assert worse.regressed
    assert {change.arm for change in worse.changes if change.regressed} == {"lorap"}
    change = next(change for change in worse.changes if change.regressed)
    assert change.change == pytest.approx(-0.1)
    assert change.separate
    assert not compare(rows, scaled(rows, 0.9), threshold=0.2).regressed
    assert not compare(rows, scaled(rows, 1.5)).regressed
    assert not compare(rows, scaled(rows, 0.97)).regressed
    assert not compare(rows, scaled(rows, 0.9), metric="ratio_to_base").regressed


def test_what_only_one_has_is_said(rows: list[dict[str, Any]]) -> None:
    found = compare(rows, [row for row in rows if row["arm"] != "lora"])
    assert found.only_before[0] == "lora at 1 adapters of rank 8"
    assert found.only_after == ()
    other = [{**row, "setup": {**row["setup"], "requests": 99, "machine": {}}, "partial": True} for row in rows]
    found = compare(rows, other)
    assert found.differences == ("requests: 4 and 99", "the machine")
    assert found.partial


def test_bad_comparisons_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="no measured arm in common"):
        compare([row for row in rows if row["arm"] == "base"], [row for row in rows if row["arm"] == "lora"])
    with pytest.raises(UsageError, match="`--threshold` is not valid"):
        compare(rows, rows, threshold=5)
    with pytest.raises(UsageError, match="accepted: output_tokens_per_s"):
        compare(rows, rows, metric="joy")
