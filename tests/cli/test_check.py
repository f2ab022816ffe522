"""`preft check`: the verdict in words and in JSON, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preft.adapters.adapter import Adapter
from preft.adapters.store import save_adapter
from preft_cli import engines
from preft_cli.app import run
from tests.helpers.tiny import build_tiny, random_adapter


@pytest.fixture
def adapter(tiny_llama: Path, tmp_path: Path) -> Path:
    save_adapter(random_adapter(tiny_llama, seed=3, blocks=(1,)), tmp_path / "mine")
    return tmp_path / "mine"


def test_an_adapter_that_is_on(adapter: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(adapter), "--base", str(tiny_llama), "--engine", "none", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for line in (
        "adapter products in decode     0",
        "decode step equals the base's  yes",
        "engine against Hugging Face    not compared",
        "verdict                        passed",
    ):
        assert f"{line}\n" in captured.out
    assert "\nblock output      1     8 " in captured.out


def test_an_adapter_that_moves_nothing_fails(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = random_adapter(tiny_llama, seed=3)
    tensors = {name: tensor * 0 if name.endswith(".up") else tensor for name, tensor in made.tensors.items()}
    save_adapter(Adapter.build(made.manifest, tensors), tmp_path / "zero")
    flags = ["--base", str(tiny_llama), "--engine", "none", "--quiet"]
    assert run(["check", str(tmp_path / "zero"), *flags, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is False
    assert document["reasons"][0].startswith("it moves nothing")
    assert run(["check", str(tmp_path / "zero"), *flags]) == 1
    shown = capsys.readouterr().out
    assert "verdict                        FAILED\n" in shown
    assert document["reasons"][0] in shown


def test_another_base_is_refused(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = build_tiny(tmp_path / "other", seed=9)
    assert run(["check", str(adapter), "--base", str(other), "--engine", "none", "--quiet"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: The base model has the right shape but other weights")


def test_an_unknown_engine_is_refused(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(adapter), "--base", "x", "--engine", "sglang"]) == 2
    assert "accepted: auto, vllm, none" in capsys.readouterr().err


def test_without_vllm_the_comparison_is_left_out_aloud(
    adapter: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "vllm_is_installed", lambda: False)
    assert run(["check", str(adapter), "--base", str(tiny_llama)]) == 0
    assert "note: vLLM is not installed" in capsys.readouterr().err
    assert run(["check", str(adapter), "--base", str(tiny_llama), "--engine", "vllm"]) == 1
    assert "error: vLLM is not installed\n" in capsys.readouterr().err


@pytest.mark.engine
def test_the_engine_is_compared(adapter: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(adapter), "--base", str(tiny_llama), "--engine", "vllm", "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["parity"]) == 6
    assert all(row["equal"] for row in document["parity"])
