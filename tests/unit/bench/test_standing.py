"""The standing benchmark's records and the tables that are written from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.standing import (
    BEGIN,
    CALL,
    END,
    HISTORY,
    README,
    RECORDS,
    history,
    read_records,
    readme_table,
    record_of,
    redraw,
    replaced,
)
from preft.bench.rows import read_rows
from preft_cli.app import run
from tests.unit.bench.common import run_fake, spec_of


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    arms = ("base", "lorap", "direftp", "lora", "base-compiled")
    run_fake(spec_of(tmp_path / "r", arms=arms, adapters=(4,), repeats=3, once=("lora", "base-compiled")))
    return record_of(read_rows(tmp_path / "r"))


def test_the_tables_are_those_of_the_records() -> None:
    """What `python benchmarks/standing.py --tables` would write is what is there."""
    records = read_records(RECORDS)
    text = README.read_text(encoding="utf-8")
    assert replaced(text, readme_table(records)) == text
    assert HISTORY.read_text(encoding="utf-8") == history(records)


def test_a_record_and_its_tables(record: dict[str, Any]) -> None:
    assert (record["quiet"], record["partial"], record["requests"]) == (True, False, 4)
    assert json.loads(json.dumps(record)) == record
    table = readme_table([record])
    lines = table.splitlines()
    # 90 of 100 and of 125, over one and two arms of 60 tokens/s.
    assert "| LoRAP, rank 16, all linear modules | 91 | 0.900 [0.900, 0.900] | 0.720 | 1.500 | 0.0% |" in lines
    assert lines[4].startswith("| stock vLLM base, compiled | 125 | 1.250 |")
    assert "4 requests of 8 + 4 tokens under 4 different adapters" in lines[0]
    assert "trusted" not in table
    assert "| yes | lorap | 3 | 91 | 0.900 [0.900, 0.900] | 0.25 | 0.75 |" in history([record])


def test_a_busy_machine_does_not_reach_the_readme(record: dict[str, Any]) -> None:
    busy = {**record, "quiet": False, "created": "2030-01-01T00:00:00+00:00"}
    assert "2030-01-01" not in readme_table([record, busy])
    assert "2030-01-01" in history([record, busy])
    assert "no figure here can be trusted" in readme_table([busy])
    assert "no figure here can be trusted" in readme_table([{**record, "partial": True}])


def test_redrawing(record: dict[str, Any], tmp_path: Path) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "standing.md"
    readme.write_text(f"# before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    redraw([record], readme=readme, page=page)
    text = readme.read_text()
    assert text.startswith("# before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert readme_table([record]) in text
    redraw([record], readme=readme, page=page)
    assert readme.read_text() == text
    with pytest.raises(SystemExit, match="the README has no"):
        replaced("nothing", "table")


def test_the_call_is_one_that_bench_accepts(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from preft_cli import bench

    asked: list[Any] = []
    monkeypatch.setattr(bench, "run_throughput", lambda spec, session: asked.append(spec) or 0)
    flags = [part for option in CALL.items() for part in option]
    assert run(["bench", "throughput", str(tiny_llama), "--out", str(tmp_path), *flags]) == 0
    assert asked[0].once == ("lora", "base-compiled", "lorap-compiled")
    assert asked[0].points[0].adapters == 64


def test_the_script_says_what_it_does() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "standing.py"
    shown = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True).stdout
    assert "--tables" in shown
