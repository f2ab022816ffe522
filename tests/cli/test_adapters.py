"""`convert`, `export` and `inspect` as a user meets them: what is printed where, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preft.adapters.store import load_adapter, save_adapter
from preft_cli.app import run
from tests.helpers.tiny import build_tiny, random_adapter


@pytest.fixture(scope="module")
def peft_lora(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT LoRA of rank 4 on every linear module, with values that move the logits."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("peft") / "lora"
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tiny_llama: Path, tmp_path: Path) -> Path:
    save_adapter(random_adapter(tiny_llama, seed=1, rank=[4, 8]), tmp_path / "mine")
    return tmp_path / "mine"


def test_convert_says_what_it_wrote(
    peft_lora: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "lorap"
    assert run(["convert", str(peft_lora), str(target), "--base", str(tiny_llama), "--quiet"]) == 0
    captured = capsys.readouterr()
    written = load_adapter(target)
    assert captured.err == ""
    lines = dict(line.split(maxsplit=1) for line in captured.out.splitlines())
    assert lines == {
        "adapter": str(target),
        "kind": "LoRAP (positions prompt)",
        "base": str(tiny_llama),
        "sites": "21",
        "rank": "4",
        "scale": "2",
        "dtype": "float32",
        "digest": written.digest,
    }


def test_convert_as_json_with_progress_beside_it(
    peft_lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(peft_lora), str(tmp_path / "all"), "--positions", "all", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["digest"] == load_adapter(tmp_path / "all").digest
    assert (document["label"], document["positions"], document["num_sites"]) == ("LoRA", "all", 21)
    assert captured.err.startswith(f"Reading {peft_lora}: ")


def test_convert_refuses_a_taken_target_and_replaces_it_on_demand(
    peft_lora: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_adapter(adapter).digest
    assert run(["convert", str(peft_lora), str(adapter)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: The target `{adapter}` exists and is not empty\n\nhint: choose another folder, or pass `--force`\n"
    )
    assert load_adapter(adapter).digest == before
    assert run(["convert", str(peft_lora), str(adapter), "--force", "--quiet"]) == 0
    assert load_adapter(adapter).digest != before


@pytest.mark.parametrize(
    ("extra", "status", "text"),
    [
        (["--positions", "f+l"], 2, "error: Unknown position policy: `f+l`\n  accepted: `prompt`, `all`, or `fN+lM`"),
        (["--max-rank", "2"], 1, "error: The adapter's rank is above the limit\n  got: rank 4 at `model.layers.0."),
        (["--base", "/nowhere"], 1, "error: The model folder `/nowhere` does not exist\n"),
    ],
)
def test_a_failed_convert_leaves_nothing(
    peft_lora: Path, tmp_path: Path, extra: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(peft_lora), str(tmp_path / "lorap"), "--quiet", *extra]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(text)
    assert list(tmp_path.iterdir()) == []


def test_inspect_shows_the_adapter(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(adapter)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"digest    {load_adapter(adapter).digest} (verified)\n" in captured.out
    assert "kind      LoRAP (positions prompt)\n" in captured.out
    assert "\nmodule     kind    sites  rank  scale  parameters\n" in captured.out
    assert "\nq_proj     linear      3  4, 8  2            4096\n" in captured.out
    assert " \n" not in captured.out, "no line ends in blanks"


def test_inspect_as_json(adapter: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(adapter), "--json", "--base", str(tiny_llama)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["digest"] == load_adapter(adapter).digest
    assert document["base_match"]["fits"] is True
    assert len(document["manifest"]["sites"]) == 21


def test_inspect_fails_on_a_base_that_does_not_fit(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = build_tiny(tmp_path / "other", seed=7)
    assert run(["inspect", str(adapter), "--base", str(other)]) == 1
    assert "weights differ" in capsys.readouterr().out


def test_inspect_of_a_peft_folder_says_what_to_do(peft_lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(peft_lora), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        f"error: `{peft_lora}` is not a preft adapter: it has no `preft.json`\n  got: a PEFT adapter\n\n"
        f"hint: convert it first: `preft convert {peft_lora} DST`\n"
    )
    assert json.loads(captured.out)["error"]["got"] == "a PEFT adapter"


def test_a_damaged_adapter_is_no_traceback(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = adapter / "preft.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-5])
    assert run(["inspect", str(adapter)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "internal" not in captured.err


def test_export_needs_the_acknowledgement(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "peft"
    assert run(["export", str(adapter), str(target)]) == 2
    assert "hint: pass `--as-all-token`" in capsys.readouterr().err
    assert not target.exists()
    assert run(["export", str(adapter), str(target), "--format", "peft", "--as-all-token", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_sites"] == 21
    assert captured.err.startswith("note: positions `prompt` are lost")
    assert (target / "adapter_config.json").is_file()


def test_export_knows_its_formats(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(adapter), str(tmp_path / "x"), "--format", "gguf", "--as-all-token"]) == 2
    assert capsys.readouterr().err == "error: Unknown export format: `gguf`\n  accepted: peft\n"
