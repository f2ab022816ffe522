"""`preft models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preft_cli.app import run

NAME = "smollm2-135m-instruct"


def test_list_says_whether_a_model_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path))
    assert run(["models", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["model"], row["cached"]) == (NAME, None)
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert run(["models", "list"]) == 0
    assert f"{folder}\n" in capsys.readouterr().out


def test_an_unknown_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "fetch", "gpt-2", str(tmp_path / "x")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: There is no embedded model named `gpt-2`\n  accepted: {NAME}\n")
    assert not (tmp_path / "x").exists()


def test_a_taken_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert run(["models", "fetch", NAME, str(tmp_path)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert run(["models", "fetch", NAME, str(tmp_path), "--force"]) == 2
    assert "is not a checkpoint, so `--force` does not replace it" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"


@pytest.mark.smollm2
def test_fetch_writes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "smollm2"
    assert run(["models", "fetch", NAME, str(folder), "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"model": NAME, "folder": str(folder)}
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (folder / name).is_file(), name
