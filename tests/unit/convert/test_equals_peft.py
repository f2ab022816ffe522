"""A1-A5, A11, A13, A14: sites, ranks, scales and logits are those of the real PEFT."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.peft_lora import (
    base_logits,
    edit_config,
    edit_tensors,
    make_peft,
    peft_logits,
    peft_sites,
    site_logits,
)

# Two float32 evaluations of one formula, differing in the order of additions; logits here are of order 10.
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}

CONFIGS: dict[str, dict[str, Any]] = {
    "overlapping patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {r".*layers\.0\..*": 3, "q_proj": 17},
        "alpha_pattern": {"q_proj": 5, r"model\.layers\.[01]\..*": 11},
    },
    "rslora": {"use_rslora": True, "r": 6, "lora_alpha": 9},
    "rslora with patterns": {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 5},
        "alpha_pattern": {"v_proj": 3},
        "lora_alpha": 12,
    },
    "alpha float": {"lora_alpha": 7.3},
    "alpha negative": {"lora_alpha": -4},
    "all-linear": {"target_modules": "all-linear"},
    "regular expression": {"target_modules": r".*\.(1|2)\.self_attn\.(q|o)_proj"},
    "layer prefix": {"target_modules": ["layers.1.self_attn.q_proj", "model.layers.2.mlp.up_proj"]},
    "layers list": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "layers int": {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "layers pattern list": {"target_modules": ["o_proj"], "layers_to_transform": [2], "layers_pattern": ["layers"]},
    "excluded names": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.v_proj"]},
    "excluded regex": {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0.*"},
    "default targets": {"target_modules": None},
    "only gate": {"target_modules": ["gate_proj"]},
    "rank 1": {"r": 1},
    "rank 512": {"r": 512, "target_modules": ["q_proj"], "layers_to_transform": [0]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head alone": {"target_modules": ["lm_head"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "dropout": {"lora_dropout": 0.5},
    "bias without bias tensors": {"bias": "all"},
    "fan_in_fan_out on linear": {"fan_in_fan_out": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sites_scales_and_logits_equal_pefts(name: str, bases: Any, converted: Any, ids: Any, tmp_path: Path) -> None:
    folder = make_peft(bases(), tmp_path / "peft", **CONFIGS[name])
    _, adapter = converted(folder)
    expected = peft_sites(bases(), folder)
    assert {site.path: (site.rank, site.scale) for site in adapter.manifest.sites} == expected
    theirs, ours = peft_logits(bases(), folder, ids), site_logits(bases(), adapter, ids)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    # Premise: the adapter does move the logits, by far more than the tolerance.
    assert (theirs - base_logits(bases(), ids)).abs().max() > 1e-2


def test_a1_overlapping_patterns_take_the_first_key_that_matches(bases: Any, converted: Any, tmp_path: Path) -> None:
    folder = make_peft(bases(), tmp_path / "peft", **CONFIGS["overlapping patterns"])
    _, adapter = converted(folder)
    ranks = {site.path: site.rank for site in adapter.manifest.sites}
    assert ranks["model.layers.0.self_attn.q_proj"] == 3
    assert ranks["model.layers.1.self_attn.q_proj"] == 17
    assert ranks["model.layers.1.self_attn.k_proj"] == 4


@pytest.mark.parametrize("pattern", [{}, {"q_proj": 6}])
def test_a2_rslora_divides_by_the_root_of_each_sites_rank(
    pattern: dict[str, int], bases: Any, converted: Any, tmp_path: Path
) -> None:
    folder = make_peft(
        bases(), tmp_path / "peft", use_rslora=True, r=8, lora_alpha=16, rank_pattern={"v_proj": 2},
        alpha_pattern=pattern,
    )  # fmt: skip
    _, adapter = converted(folder)
    for site in adapter.manifest.sites:
        alpha = pattern.get("q_proj", 16) if site.path.endswith("q_proj") else 16
        assert site.rank == (2 if site.path.endswith("v_proj") else 8)
        assert site.scale == alpha / math.sqrt(site.rank)


@pytest.mark.parametrize(("alpha", "scale"), [(..., 2.0), (16, 4.0), (7.5, 1.875), (0, 0.0)])
def test_a3_alpha_missing_integer_float_and_zero(alpha: Any, scale: float, source: Path, converted: Any) -> None:
    report, adapter = converted(edit_config(source, lora_alpha=alpha))
    assert {site.scale for site in adapter.manifest.sites} == {scale}  # PEFT's default is 8, over rank 4
    assert any("moves nothing" in warning for warning in report.warnings) == (alpha == 0)
    assert adapter.moves_nothing() == (alpha == 0)


def test_a5_no_site_is_invented_for_missing_members_of_a_packed_projection(
    bases: Any, converted: Any, tmp_path: Path
) -> None:
    folder = make_peft(bases(), tmp_path / "peft", target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 2})
    _, adapter = converted(folder)
    assert {site.path.rpartition(".")[2] for site in adapter.manifest.sites} == {"q_proj", "k_proj"}
    assert {site.rank for site in adapter.manifest.sites if site.path.endswith("k_proj")} == {2}


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_a11_head_is_converted_and_noted(name: str, bases: Any, converted: Any, ids: Any, tmp_path: Path) -> None:
    base = bases(name)
    folder = make_peft(base, tmp_path / "peft", target_modules=["lm_head", "q_proj"])
    report, adapter = converted(folder, positions="prompt")
    note = next(note for note in report.notes if "output head" in note)
    assert "token 1" in note
    assert note in adapter.manifest.provenance["notes"]
    assert adapter.manifest.base.architecture["tie_word_embeddings"] == (name == "tied")
    torch.testing.assert_close(site_logits(base, adapter, ids), peft_logits(base, folder, ids), **TOLERANCE)
    report, _ = converted(folder, positions="all")
    assert not any("output head" in note for note in report.notes)


def test_a13_mixed_types_are_held_in_the_narrowest_type_that_is_exact(source: Path, converted: Any) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "lora_A" in name:
                tensors[name] = tensors[name].bfloat16()

    report, adapter = converted(edit_tensors(source, halve))
    assert adapter.manifest.dtype == "float32"
    assert any("bfloat16 and float32" in note for note in report.notes)


def test_a13_values_beyond_float16_survive_beside_float16(source: Path, converted: Any) -> None:
    huge = 3.0e38

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16() if "lora_A" in name else tensors[name].half()
        first = next(name for name in tensors if "lora_A" in name)
        tensors[first][0, 0] = huge

    _, adapter = converted(edit_tensors(source, mix))
    assert adapter.manifest.dtype == "float32"
    largest = max(float(tensor.abs().max()) for tensor in adapter.tensors.values())
    assert largest == float(torch.tensor(huge).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a13_one_type_is_kept_bit_for_bit(dtype: torch.dtype, source: Path, converted: Any) -> None:
    kept: dict[str, torch.Tensor] = {}

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = kept[name] = tensors[name].to(dtype)

    _, adapter = converted(edit_tensors(source, narrow))
    assert adapter.manifest.dtype == str(dtype).removeprefix("torch.")
    down = adapter.tensors["model.layers.0.self_attn.q_proj.down"]
    assert torch.equal(down, kept["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])


@pytest.mark.parametrize("fan_in_fan_out", [True, False, ...])
def test_a14_conv1d_equals_peft(fan_in_fan_out: Any, bases: Any, converted: Any, ids: Any, tmp_path: Path) -> None:
    base = bases("gpt2")
    folder = make_peft(base, tmp_path / "peft", target_modules=["c_attn", "c_fc", "mlp.c_proj"], fan_in_fan_out=True)
    edit_config(folder, fan_in_fan_out=fan_in_fan_out)
    report, adapter = converted(folder)
    shapes = {site.path: (site.in_features, site.out_features) for site in adapter.manifest.sites}
    assert shapes["transformer.h.0.attn.c_attn"] == (64, 192)
    assert any("Conv1D" in note for note in report.notes)
    torch.testing.assert_close(site_logits(base, adapter, ids), peft_logits(base, folder, ids), **TOLERANCE)


def test_a_configuration_of_an_old_peft_lacks_fields_and_works(source: Path, bases: Any, converted: Any) -> None:
    _, expected = converted(source)
    # As PEFT 0.2 wrote it.
    config = {
        "base_model_name_or_path": str(bases()), "bias": "none", "enable_lora": None, "fan_in_fan_out": False,
        "inference_mode": True, "lora_alpha": 8, "lora_dropout": 0.05, "merge_weights": False, "modules_to_save": None,
        "peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (source / "adapter_config.json").write_text(json.dumps(config))
    _, adapter = converted(source)
    assert adapter.digest == expected.digest


def test_negative_control_a_wrong_scale_is_seen(source: Path, bases: Any, converted: Any, ids: Any) -> None:
    theirs = peft_logits(bases(), source, ids)
    _, adapter = converted(edit_config(source, lora_alpha=9))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(site_logits(bases(), adapter, ids), theirs, **TOLERANCE)
