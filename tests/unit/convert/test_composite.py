"""Vision-language and mixture models: language sites convert, the rest is refused by name. No weights are needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from preft.errors import UnsupportedError
from preft.models.structure import read_structure

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
Q = "self_attn.q_proj"


@pytest.fixture(scope="module")
def vision_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config={**TEXT, "model_type": "gemma3_text"}, vision_config=vision)
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixture_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    AutoConfig.for_model("mixtral", **TEXT, num_local_experts=4).save_pretrained(folder)
    return folder


def write(folder: Path, base: Path, paths: list[str], targets: Any, width: int = 32) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "target_modules": targets, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for path in paths:
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(2, width)
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(width, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_structure_of_a_composite_model(vision_base: Path) -> None:
    structure = read_structure(vision_base)
    assert structure.blocks == ("model.language_model.layers.0", "model.language_model.layers.1")
    assert structure.is_language(f"model.language_model.layers.0.{Q}")
    assert structure.is_language("lm_head")
    assert not structure.is_language("model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("front", ["model", "language_model.model", "model.language_model"])
def test_a_text_adapter_finds_the_language_model_inside(
    front: str, vision_base: Path, tmp_path: Path, converted: Any
) -> None:
    paths = [f"{front}.layers.{layer}.{Q}" for layer in range(2)]
    # The vision tower has modules of the same name, so the adapter says which it means where names coincide.
    targets = paths if front == "model.language_model" else ["q_proj"]
    _, adapter = converted(write(tmp_path / "peft", vision_base, paths, targets))
    assert [site.path for site in adapter.manifest.sites] == [f"model.language_model.layers.{n}.{Q}" for n in range(2)]
    assert adapter.manifest.base.weights is None


def test_vision_sites_are_refused_by_name(vision_base: Path, tmp_path: Path, converted: Any) -> None:
    path = next(
        path for path in read_structure(vision_base).modules if "vision_tower" in path and path.endswith("q_proj")
    )
    folder = write(tmp_path / "peft", vision_base, [path], [path], width=16)
    with pytest.raises(UnsupportedError, match="outside the language model"):
        converted(folder)


def test_a_mixture_takes_attention_sites(mixture_base: Path, tmp_path: Path, converted: Any) -> None:
    paths = [f"model.layers.{layer}.{Q}" for layer in range(2)]
    _, adapter = converted(write(tmp_path / "peft", mixture_base, paths, ["q_proj"]))
    assert len(adapter.manifest.sites) == 2


@pytest.mark.parametrize("path", ["model.layers.0.block_sparse_moe.experts.1.w1", "model.layers.0.mlp.experts.1.w1"])
def test_expert_sites_are_refused_by_name(path: str, mixture_base: Path, tmp_path: Path, converted: Any) -> None:
    with pytest.raises(UnsupportedError, match="experts"):
        converted(write(tmp_path / "peft", mixture_base, [path], ["w1"]))


@pytest.mark.parametrize("family", ["t5", "whisper", "vit"])
def test_a_base_that_does_not_generate_text_is_refused(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="not a decoder"):
        read_structure(tmp_path)
