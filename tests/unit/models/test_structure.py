"""The structure of a checkpoint on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest

from preft.errors import FileError
from preft.models.structure import ModuleKind, build_meta_model, read_structure
from tests.helpers.tiny import build_tiny, linear_sizes


def test_llama(tiny_llama: Path) -> None:
    structure = read_structure(tiny_llama)
    assert structure.model_class == "LlamaForCausalLM"
    assert structure.blocks == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert structure.block_list == "model.layers"
    assert (structure.head, structure.embedding, structure.tied) == ("lm_head", "model.embed_tokens", False)
    assert structure.hidden_size == 128
    linear = {
        path: (info.in_features, info.out_features)
        for path, info in structure.modules.items()
        if info.kind is ModuleKind.LINEAR
    }
    assert linear == linear_sizes(tiny_llama)
    assert structure.modules["model.embed_tokens"].kind is ModuleKind.EMBEDDING


def test_gpt2_has_conv1d_and_a_tied_head(tmp_path: Path) -> None:
    structure = read_structure(build_tiny(tmp_path, "gpt2", hidden_size=64, num_hidden_layers=2))
    assert structure.tied
    info = structure.modules["transformer.h.0.attn.c_attn"]
    assert (info.kind, info.in_features, info.out_features) == (ModuleKind.CONV1D, 64, 192)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text", "phi3", "gpt_neox", "mixtral"])
def test_other_families_have_blocks_and_a_head(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family, num_hidden_layers=2).save_pretrained(tmp_path)
    structure = read_structure(tmp_path)
    assert len(structure.blocks) == 2
    assert structure.head in structure.modules
    assert any(path.startswith(structure.blocks[1]) for path in structure.modules)


def test_no_memory_is_used_and_quantisation_is_not_applied(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", num_hidden_layers=2)
    config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config.save_pretrained(tmp_path)
    model = build_meta_model(tmp_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert "model.layers.0.self_attn.q_proj" in read_structure(tmp_path).modules


def test_a_model_that_needs_code_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}}'
    )
    (tmp_path / "code.py").write_text("raise SystemExit('imported')")
    with pytest.raises(FileError, match="configuration cannot be read"):
        read_structure(tmp_path)
