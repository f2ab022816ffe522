"""`preft bench`: what is refused before an engine starts, exit statuses, and one real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preft.bench.spec import require_fitting
from preft.errors import UsageError
from preft_cli import bench
from preft_cli.app import run
from tests.unit.bench.common import FACTS, fake_adapters, fake_command, run_fake, spec_of


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whether a benchmark was begun; the tests here must not get that far."""
    found: list[object] = []
    monkeypatch.setattr("preft.bench.throughput.run_bench", lambda *args, **kwargs: found.append(args))
    return found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arms", "base,sglang"], "`--arms` is not valid\n  got: sglang\n  accepted: base, stock-lora, lora"),
        (["--arms", ","], "`--arms` is not valid\n  got: none"),
        (["--requests", "0"], "`--requests` is not valid\n  got: 0\n  accepted: a whole number of at least 1"),
        (["--adapters", "8,x"], "`--adapters` is not valid\n  got: `8,x`"),
        (["--adapters", "0"], "`--adapters` is not valid"),
        (["--adapters", "8,8"], "`--adapters` is not valid\n  got: 8, 8\n  accepted: different whole numbers"),
        (["--rank", "1024"], "The rank is too large\n  got: 1024\n  accepted: at most 512"),
        (["--slots", "0"], "`--slots` is not valid"),
        (["--output-len", "0"], "`--output-len` is not valid"),
        (["--repeats", "0"], "`--repeats` is not valid"),
        (["--mode", "fast"], "accepted: eager, default"),
        (["--popularity", "zipf"], "accepted: distinct, uniform, zipf:A"),
        (["--popularity", "weights:1/2"], "got: 2 weights for 8 adapters"),
        (["--rank", "8+"], "`--rank` is not valid\n  got: `8+`"),
        (["--rank", "8+64,8+64"], "`--rank` is not valid\n  got: 8+64, 8+64"),
        (["--targets", "q_proj,x_proj"], "`--targets` is not valid\n  got: x_proj\n  accepted: all, attention, or of"),
        (["--given", "lorap"], "`--given` is not valid\n  got: `lorap`\n  accepted: ARM=DIR"),
        (["--given", "base=x"], "`--given` is not valid\n  got: base\n  accepted: stock-lora, lora, lorap, direftp"),
        (["--given", "lorap=x", "--rank", "8,16"], "`--rank` is a sweep"),
        (["--once", "sglang"], "`--once` is not valid\n  got: sglang"),
        (["--arm-limit-s", "0"], "`--arm-limit-s` is not valid"),
        (["--tp", "0"], "`--tp` is not valid"),
        (["--dtype", "int8"], "accepted: auto, float32, bfloat16, float16"),
        (["--input-len", "600"], "The requests are longer than the model's context\n  got: 728 tokens"),
        (["--adapters", "100000000"], "100000000 adapters of the arm `stock-lora` do not fit the memory"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    flags: list[str],
    message: str,
    tiny_llama: Path,
    tmp_path: Path,
    started: list[object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["bench", "throughput", str(tiny_llama), "--out", str(tmp_path), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert started == []


def test_an_unwritable_folder_is_refused(
    tiny_llama: Path, tmp_path: Path, started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    kept = ["--adapter-dir", str(tmp_path / "file")]
    assert run(["bench", "throughput", str(tiny_llama), "--out", str(tmp_path / "good"), *kept]) == 1
    assert "hint: choose another --adapter-dir" in capsys.readouterr().err
    for out in ("file", "file/below"):
        assert run(["bench", "throughput", str(tiny_llama), "--out", str(tmp_path / out)]) == 1
        assert f"The folder `{tmp_path / out}` cannot be written" in capsys.readouterr().err
    assert started == []


def test_adapters_that_do_not_fit_the_disk(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("lorap",), adapters=(1000,))
    require_fitting(spec, FACTS, memory_bytes=10**9, disk_bytes=10**9)
    with pytest.raises(UsageError, match="do not fit the disk"):
        require_fitting(spec, FACTS, memory_bytes=10**9, disk_bytes=10**6)
    with pytest.raises(UsageError, match="1000 adapters of the arm `lorap` do not fit the memory"):
        require_fitting(spec, replace(FACTS, linear_widths=10**6), memory_bytes=10**9, disk_bytes=10**12)


def throughput(spec: Any, *actions: str, as_json: bool = False) -> int:
    from preft_cli.console import Session

    parts = {"command": fake_command(spec.out, *actions), "adapters": fake_adapters}
    return bench.run_throughput(spec, Session(as_json=as_json, quiet=True), **parts)


def test_text_and_files(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput(spec_of(tmp_path, model=str(tiny_llama))) == 0
    shown = capsys.readouterr().out
    assert "tokens/s, median (range)" in shown
    assert "0.900 [0.900, 0.900]" in shown
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"rows.jsonl", "throughput.png", "throughput.svg", "index.html", "logs"}


def test_json_is_one_row_a_line(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput(spec_of(tmp_path, model=str(tiny_llama), repeats=2), as_json=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 6
    assert {row["repeat"] for row in rows} == {0, 1}
    keys = {"arm", "repeat", "adapters", "slots", "rank", "requests", "output_tokens_per_s", "ratio_to_base"}
    assert all(keys <= set(row) for row in rows)
    assert rows == [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_failed_arm_is_status_1(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput(spec_of(tmp_path, model=str(tiny_llama), repeats=1), "fail=lora") == 1
    captured = capsys.readouterr()
    assert "warning: PARTIAL: the run was not complete: an arm failed" in captured.err
    assert "error: lora: no such luck; its log: " in captured.err
    assert (tmp_path / "index.html").exists()


def test_ctrl_c_is_status_130(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput(spec_of(tmp_path, model=str(tiny_llama), repeats=1), "hang=lora", as_json=True) == 130
    captured = capsys.readouterr()
    assert [json.loads(line)["partial"] for line in captured.out.splitlines()] == [True]
    assert "warning: PARTIAL: the run was interrupted" in captured.err


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_fake(spec_of(tmp_path / "a", repeats=1))
    (tmp_path / "b").mkdir()
    rows = [json.loads(line) for line in (tmp_path / "a" / "rows.jsonl").read_text().splitlines()]
    slower = [{**row, "output_tokens_per_s": row["output_tokens_per_s"] * 0.8} for row in rows]
    (tmp_path / "b" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in slower))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert run(["bench", "compare", a, a]) == 0
    assert "+0.0%" in capsys.readouterr().out
    assert run(["bench", "compare", a, b]) == 1
    assert "SLOWER" in capsys.readouterr().out
    assert run(["bench", "compare", a, b, "--threshold", "0.3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["regressed"] is False
    assert run(["bench", "compare", a, str(tmp_path / "c")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.engine
def test_a_real_run(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--arms", "base,stock-lora,lorap", "--adapters", "3", "--slots", "2", "--rank", "4", "--requests", "5"]
    lengths = ["--input-len", "12", "--output-len", "6", "--repeats", "1", "--warm-runs", "1", "--dtype", "float32"]
    command = ["bench", "throughput", str(tiny_llama), *flags, *lengths, "--out", str(tmp_path), "--json", "--quiet"]
    assert run(command) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["arm"] for row in rows] == ["base", "stock-lora", "lorap"]
    for row in rows:
        assert row["output_tokens"] == 30
        assert row["output_tokens_per_s"] > 0
        assert row["engine"]["eager"] is True
        assert row["engine"]["dtype"] == "float32"
        assert row["peak_rss_bytes"] > 10**8
        assert row["fairness"]["adapters"] == 3
        assert 0 < row["prefill_s"] < row["seconds"]
        assert row["energy"]["reason"]  # no GPU here
    shares = {row["arm"]: row["adapter_kernels"] for row in rows}
    assert shares["base"]["share"] == 0
    assert 0 < shares["lorap"]["prefill_share"] < 1
    assert shares["lorap"]["decode_share"] == 0  # the point of it all
    assert 0 < shares["stock-lora"]["decode_share"] < 1
    assert len(list((tmp_path / "adapters").glob("*/lorap-r4/a*"))) == 3
