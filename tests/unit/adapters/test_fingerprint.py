"""Which base an adapter was made for: the architecture is hard, the weights can be overridden."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from preft.adapters.fingerprint import digest_weights, fingerprint_base
from preft.errors import BaseMismatchError, FileError
from tests.helpers.tiny import build_tiny

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "vocab_size": 96}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("fingerprint") / "base", **SMALL)


def test_a_base_matches_itself_by_any_name(base: Path) -> None:
    one, two = fingerprint_base(base), fingerprint_base(base, model="another name")
    assert one.weights
    assert one.architecture == two.architecture
    one.require_same(two)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 3}, {"vocab_size": 128}, {"num_key_value_heads": 4}, {"tie_word_embeddings": True}]
)
def test_another_architecture_is_never_allowed(change: dict[str, Any], base: Path, tmp_path: Path) -> None:
    other = fingerprint_base(build_tiny(tmp_path / "other", **{**SMALL, **change}))
    with pytest.raises(BaseMismatchError, match="another architecture") as caught:
        fingerprint_base(base).require_same(other, allow_weights=True)
    assert next(iter(change)) in str(caught.value)


def test_other_weights_can_be_allowed(base: Path, tmp_path: Path) -> None:
    other = fingerprint_base(build_tiny(tmp_path / "other", seed=5, **SMALL))
    one = fingerprint_base(base)
    with pytest.raises(BaseMismatchError, match="other weights") as caught:
        one.require_same(other)
    assert "--allow-base-mismatch" in (caught.value.hint or "")
    one.require_same(other, allow_weights=True)
    replace(one, mismatch_allowed=True).require_same(other)
    replace(one, weights=None).require_same(other)


def test_a_base_saved_again_in_a_wider_type_keeps_its_digests(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.float32).save_pretrained(tmp_path / "wide")
    assert digest_weights(tmp_path / "narrow") == digest_weights(tmp_path / "wide")
    assert digest_weights(tmp_path / "narrow") != digest_weights(base)


def test_shards_do_not_change_digests(base: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert digest_weights(tmp_path / "sharded") == digest_weights(base)


def test_a_folder_without_weights_has_no_digests(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    assert fingerprint_base(tmp_path).weights is None


def test_a_base_with_a_merged_lora_is_another_base(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data += 0.01
    model.save_pretrained(tmp_path / "merged")
    with pytest.raises(BaseMismatchError, match="q_proj"):
        fingerprint_base(base).require_same(fingerprint_base(tmp_path / "merged"))


def test_damaged_weights_are_said(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(FileError, match="weights cannot be read"):
        fingerprint_base(tmp_path)


UNREADABLE = [
    None,
    "{",
    "[]",
    '{"model_type": "no-such-model"}',
    '{"model_type": ["llama"]}',
    '{"model_type": "llama", "hidden_size": "many"}',
    '{"model_type": "llama", "num_attention_heads": 7}',
    json.dumps({"auto_map": {"x": "y"}}),
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_configuration_that_cannot_be_read_is_said(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(FileError, match="configuration cannot be read"):
        fingerprint_base(tmp_path)
