"""A10: every field of PEFT's LoraConfig has a row, and what changes numbers is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import PeftType

from preft.convert.lora_fields import LORA_FIELDS, Effect, require_supported
from preft.convert.run import convert
from preft.convert.settings import DEFAULT_ALPHA, DEFAULT_RANK
from preft.errors import AdapterError, UnsupportedError
from tests.helpers.peft_lora import edit_config, edit_tensors, make_peft

GONE_FROM_PEFT = {"enable_lora", "merge_weights"}
REFUSED: dict[str, Any] = {
    "peft_type": "VERA",
    "task_type": "SEQ_CLS",
    "init_lora_weights": "pissa",
    "use_dora": True,
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "kasa_config": {"beta": 1.0},
    "arrow_config": {"top_k": 3},
    "velora_config": {"num_groups": 64},
    "monteclora_config": {"num_samples": 8},
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 2], [1, 3]],
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [3],
    "target_parameters": ["experts.gate_up_proj"],
    "megatron_config": {"x": 1},
    "enable_lora": [True, False],
}


def test_every_field_of_peft_has_a_row_and_no_row_is_made_up() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert set(LORA_FIELDS) == fields | GONE_FROM_PEFT


def test_every_field_that_peft_calls_a_variant_is_refused() -> None:
    variants = {field.name for field in dataclasses.fields(LoraConfig) if field.metadata.get("is_lora_variant")}
    assert variants
    assert all(LORA_FIELDS[name].effect is Effect.REFUSED for name in variants)


def test_every_refused_row_is_exercised_here() -> None:
    refused = {name for name, row in LORA_FIELDS.items() if row.effect is Effect.REFUSED}
    assert refused == set(REFUSED)
    assert all((row.refuses is not None) == (row.effect is Effect.REFUSED) for row in LORA_FIELDS.values())


def test_pefts_defaults_are_accepted_and_ours_are_the_same() -> None:
    config = LoraConfig()
    require_supported(config.to_dict() | {"peft_type": "LORA"})
    assert (config.r, config.lora_alpha) == (DEFAULT_RANK, DEFAULT_ALPHA)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_with_reason_and_way_out(name: str, source: Path, tmp_path: Path) -> None:
    edit_config(source, **{name: REFUSED[name]})
    with pytest.raises(UnsupportedError) as caught:
        convert(str(source), tmp_path / "out")
    assert f"`{name}`" in str(caught.value)
    assert caught.value.hint
    assert caught.value.accepted
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [kind.value for kind in PeftType if kind is not PeftType.LORA])
def test_other_peft_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{kind}'"):
        require_supported({"peft_type": kind})


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "from-the-future", 3]
)
def test_initialisations_that_change_the_base_are_refused(init: Any) -> None:
    with pytest.raises(UnsupportedError, match="init_lora_weights"):
        require_supported({"peft_type": "LORA", "init_lora_weights": init})


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_accepted(init: Any) -> None:
    require_supported({"peft_type": "LORA", "init_lora_weights": init})


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_premise_these_initialisations_do_change_the_base(init: str, bases: Any) -> None:
    from peft import get_peft_model

    from tests.helpers.peft_lora import load_base

    model = load_base(bases())
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init))
    assert not torch.equal(before, model.model.layers[0].self_attn.q_proj.base_layer.weight)


def test_an_unknown_field_is_refused(source: Path, tmp_path: Path) -> None:
    edit_config(source, use_tomorrows_lora=None)
    with pytest.raises(UnsupportedError, match="`use_tomorrows_lora`"):
        convert(str(source), tmp_path / "out")


def test_two_refused_fields_are_both_named() -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_supported({"peft_type": "LORA", "use_dora": True, "lora_bias": True})
    assert "use_dora" in str(caught.value)
    assert "lora_bias" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A.*embedding"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ],
)
def test_what_peft_itself_writes_for_these_is_refused(
    options: dict[str, Any], match: str, bases: Any, tmp_path: Path
) -> None:
    folder = make_peft(bases(), tmp_path / "peft", **options)
    with pytest.raises(UnsupportedError, match=match):
        convert(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_refused_where_the_base_has_some(bias: str, bases: Any, tmp_path: Path) -> None:
    folder = make_peft(bases("qwen2"), tmp_path / "peft", bias=bias)
    with pytest.raises(UnsupportedError, match="trained bias"):
        convert(str(folder), tmp_path / "out")


def test_tying_the_head_to_the_embedding_is_refused_on_a_tied_base(bases: Any, tmp_path: Path) -> None:
    folder = make_peft(bases("tied"), tmp_path / "peft", target_modules=["lm_head", "q_proj"])
    edit_config(folder, ensure_weight_tying=True)
    with pytest.raises((UnsupportedError, AdapterError), match="ensure_weight_tying"):
        convert(str(folder), tmp_path / "out")


def test_tying_without_effect_is_accepted(source: Path, converted: Any) -> None:
    _, adapter = converted(edit_config(source, ensure_weight_tying=True))
    assert len(adapter.manifest.sites) == 6


def test_an_embedding_of_its_own_is_refused_and_a_copy_is_left_out(source: Path, bases: Any, converted: Any) -> None:
    from tests.helpers.peft_lora import load_base

    name = "base_model.model.model.embed_tokens.weight"
    weight = load_base(bases()).model.embed_tokens.weight.detach().clone()
    edit_tensors(source, lambda tensors: tensors.__setitem__(name, weight))
    report, _ = converted(source)
    assert any(name in note for note in report.notes)
    edit_tensors(source, lambda tensors: tensors.__setitem__(name, weight + 1))
    with pytest.raises(UnsupportedError, match="its own embedding"):
        converted(source)
    edit_tensors(source, lambda tensors: tensors.__setitem__(name, torch.cat([weight, weight[:1]])))
    with pytest.raises(UnsupportedError, match="resizing the vocabulary"):
        converted(source)


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 0},
        {"r": "8"},
        {"r": True},
        {"lora_alpha": None},
        {"lora_alpha": "16"},
        {"rank_pattern": {"q_proj": 2.5}},
        {"alpha_pattern": {"q_proj": True}},
        {"alpha_pattern": ["q_proj"]},
        {"use_rslora": 1},
        {"target_modules": [1]},
        {"layers_to_transform": ["0"]},
        {"target_modules": "("},
        {"target_modules": "q_proj", "layers_to_transform": [0]},
    ],
)
def test_values_that_peft_could_not_have_written_are_refused(
    changes: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    edit_config(source, **changes)
    with pytest.raises(AdapterError):
        convert(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pattern_that_matches_nothing_is_said(source: Path, converted: Any) -> None:
    report, _ = converted(edit_config(source, alpha_pattern={"no_such_proj": 3}))
    assert any("no_such_proj" in warning for warning in report.warnings)
