"""`preft eval` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from preft_cli.app import run


@pytest.fixture
def call(tiny_llama: Path, adapters: dict[str, Path], tasks: Path) -> list[str]:
    flags = ["--include-path", str(tasks), "--engine", "hf", "--dtype", "float32", "--quiet"]
    named = [word for name in ("lora", "lorap") for word in ("--adapter", f"{name}={adapters[name]}")]
    return ["eval", str(tiny_llama), *named, *flags]


def test_tables_json_and_files(call: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scores"
    flags = ["--tasks", "tiny_choice,tiny_write", "--compare", "lora,lorap", "--out", str(out), "--log-samples"]
    assert run([*call, *flags]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == ["task", "metric", "filter", "base", "lora", "lorap"]
    assert lines[1].startswith("tiny_choice")
    assert any(line.startswith("lorap - lora, tiny_choice acc: ") for line in lines)
    assert len(list(out.glob("samples_*_tiny_*.jsonl"))) == 6
    assert {path.name for path in out.glob("effects.*")} == {"effects.png", "effects.svg"}
    assert "[" in lines[1]
    document = json.loads((out / "results.json").read_text())
    assert [row["arms"] for row in document["comparisons"]] == [["lora", "lorap"]] * 2
    assert run([*call, *flags]) == 1
    assert "earlier evaluation" in capsys.readouterr().err


def test_json_is_one_document_on_stdout(call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*call, "--tasks", "tiny_choice", "--limit", "4", "--batch-size", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["arms"]) == ["base", "lora", "lorap"]
    assert [row["verdict"] for row in document["comparisons"]] == ["cannot tell"] * 2
    assert document["arms"]["lorap"]["digest"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "tiny_choice", "--compare", "lora"], "`--compare` is not valid"),
        (["--tasks", "tiny_choice", "--compare", "lora,absent"], "The arms to compare are not valid"),
        (["--tasks", "tiny_choice", "--log-samples"], "needs a folder"),
        (["--tasks", "tiny_choice", "--batch-size", "0"], "`--batch-size` is not valid"),
        (["--tasks", "tiny_choice", "--dtype", "int8"], "`--dtype` is not valid"),
        (["--tasks", ","], "No task is named"),
        (["--tasks", "tiny_write", "--samples", "2"], "one answer an example"),
        (["--tasks", "tiny_write", "--temperature", "1"], "no meaning"),
    ],
)
def test_wrong_usage_is_named(
    call: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*call, *flags]) == 2
    assert message in capsys.readouterr().err
