"""`preft init` and `preft train sft` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preft.adapters.store import load_adapter
from preft_cli.app import run

ROW = {"prompt": "one two", "completion": "three"}
SHORT = ["--set", "train.max_steps=3", "--set", "train.save_every=null"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert run(["init", str(tmp_path / "p"), "--quiet"]) == 0
    monkeypatch.chdir(tmp_path / "p")
    return tmp_path / "p"


def test_init_then_train_as_it_says(project: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"examples.jsonl", "sft-direftp.yaml", "sft-lorap.yaml"} <= {path.name for path in project.iterdir()}
    capsys.readouterr()
    for name in ("lorap", "direftp"):
        assert run(["train", "sft", f"sft-{name}.yaml", "--json", "--set", f"model={tiny_llama}", *SHORT]) == 0
        captured = capsys.readouterr()
        made = json.loads(captured.out)
        assert load_adapter(project / "out" / name).digest == made["digest"]
        assert made["steps"] == 3
        assert made["data"][0]["examples"] == 50
        assert f"model: {tiny_llama}  (--set)" in captured.err
        assert "train.accumulation: 1  (recipe" in captured.err
        assert "train.warmup: 0.1  (default)" in captured.err


def test_init_replaces_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "examples.jsonl").write_text("mine")
    (project / "sft-direftp.yaml").unlink()
    assert run(["init", str(project)]) == 2
    assert "replaces nothing" in capsys.readouterr().err
    assert (project / "examples.jsonl").read_text() == "mine"
    assert not (project / "sft-direftp.yaml").exists()


def test_rows_that_are_left_out_are_named(project: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps(ROW)] * 9 + ["{"]
    (project / "mine.jsonl").write_text("\n".join(rows))
    call = ["train", "sft", "sft-lorap.yaml", "--set", f"model={tiny_llama}", "--set", "data.train=mine.jsonl", *SHORT]
    assert run(call) == 1
    captured = capsys.readouterr()
    assert "1 of the 10 rows of `mine.jsonl` cannot be used" in captured.err
    assert "hint: correct them, or raise `data.max_bad_rows`" in captured.err
    assert not (project / "out").exists()
    assert run([*call, "--set", "data.max_bad_rows=0.1"]) == 0
    captured = capsys.readouterr()
    assert "warning: mine.jsonl: 1 rows left out: the line is not a JSON object (line 10: column 2" in captured.err
    assert "LoRAP (positions prompt)" in captured.out


def test_wrong_usage(project: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "sft", "sft-lorap.yaml", "--set", "rnk=4", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["hint"] == "did you mean `rank`?"
    assert run(["train", "sft", "none.yaml"]) == 1
    assert "preft init" in capsys.readouterr().err
    call = ["train", "sft", "sft-lorap.yaml", "--set", f"model={tiny_llama}", *SHORT, "--quiet"]
    assert run(call) == 0
    assert run(call) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert run([*call, "--force"]) == 0
