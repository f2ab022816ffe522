"""A6, A7: prefixes resolved where they can mean one thing, reported, and refused otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from preft.errors import AdapterError, BaseMismatchError, UnsupportedError
from tests.helpers.peft_lora import TENSORS, edit_config, edit_tensors

Rename = Callable[[str], str]
STANDARD = "base_model.model."

RESOLVED: dict[str, Rename] = {
    "doubled": lambda name: STANDARD + name,
    "tripled": lambda name: STANDARD * 2 + name,
    "bare": lambda name: name.removeprefix(STANDARD),
    "language_model.": lambda name: name.replace(STANDARD + "model.", STANDARD + "language_model.model."),
    "model.language_model.": lambda name: name.replace(STANDARD + "model.", STANDARD + "model.language_model."),
    "without model.": lambda name: name.replace(STANDARD + "model.", STANDARD),
    "_orig_mod. inside": lambda name: name.replace("self_attn.", "_orig_mod.self_attn."),
    "_orig_mod. before": lambda name: "_orig_mod." + name,
    "module.": lambda name: name.replace(STANDARD, STANDARD + "module."),
    "module. before": lambda name: "module." + name,
    "fsdp": lambda name: name.replace("layers.", "layers._fsdp_wrapped_module.").replace(
        "layers._fsdp_wrapped_module.", "_fsdp_wrapped_module.layers."
    ),
    "adapter name": lambda name: name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."),
    "other adapter name": lambda name: name.replace("lora_A.", "lora_A.mine.").replace("lora_B.", "lora_B.mine."),
}
UNRESOLVED: dict[str, Rename] = {
    "unknown prefix": lambda name: name.replace(STANDARD + "model.", STANDARD + "banana."),
    "vision tower": lambda name: name.replace(STANDARD + "model.", STANDARD + "vision_tower.encoder."),
    "layer beyond": lambda name: name.replace("layers.2.", "layers.9."),
    "unknown module": lambda name: name.replace("q_proj", "query"),
}


def rename(folder: Path, new: Rename) -> Path:
    return edit_tensors(folder, lambda tensors: {new(name): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize("name", RESOLVED)
def test_unambiguous_names_are_resolved_and_reported(name: str, source: Path, converted: Any) -> None:
    plain, expected = converted(source)
    assert plain.notes == ()
    report, adapter = converted(rename(source, RESOLVED[name]))
    assert adapter.digest == expected.digest
    assert any("resolved" in note or "removed" in note for note in report.notes)


@pytest.mark.parametrize("name", UNRESOLVED)
def test_names_that_match_nothing_are_refused_naming_the_first(name: str, source: Path, converted: Any) -> None:
    rename(source, UNRESOLVED[name])
    wrong = sorted(key for key in load_file(source / TENSORS) if "lora_A" in key)
    with pytest.raises((AdapterError, UnsupportedError)) as caught:
        converted(source)
    assert any(key in str(caught.value) for key in wrong)
    assert caught.value.hint


def test_two_prefixes_for_one_decoder_are_refused(source: Path, converted: Any) -> None:
    rename(source, lambda name: name.replace("model.model.layers.0", "model.language_model.layers.0"))
    with pytest.raises(AdapterError, match="several ways"):
        converted(source)


def test_patterns_are_matched_against_the_names_they_were_written_for(source: Path, converted: Any) -> None:
    rename(source, RESOLVED["model.language_model."])
    edit_config(
        source,
        target_modules=r"model\.language_model\.layers\.\d+\.self_attn\.(q|v)_proj",
        alpha_pattern={r"model\.language_model\.layers\.1\..*": 4},
    )
    _, adapter = converted(source)
    assert {site.path: site.scale for site in adapter.manifest.sites} == {
        f"model.layers.{layer}.self_attn.{name}": 1.0 if layer == 1 else 2.0
        for layer in range(3)
        for name in ("q_proj", "v_proj")
    }


def test_all_linear_under_another_prefix_leaves_the_head_out(bases: Any, tmp_path: Path, converted: Any) -> None:
    from tests.helpers.peft_lora import make_peft

    folder = make_peft(bases(), tmp_path / "peft", target_modules="all-linear")
    edit_config(folder, target_modules="all-linear")
    _, expected = converted(folder)
    _, adapter = converted(rename(folder, RESOLVED["language_model."]))
    assert adapter.digest == expected.digest
    assert len(adapter.manifest.sites) == 21


def test_a_module_wrapped_but_without_tensors_is_refused(source: Path, converted: Any) -> None:
    edit_config(source, target_modules=["q_proj", "v_proj", "o_proj"])
    with pytest.raises(AdapterError, match=r"no tensors for `model\.layers\.0\.self_attn\.o_proj`"):
        converted(source)


def test_tensors_of_a_module_not_wrapped_are_refused(source: Path, converted: Any) -> None:
    edit_config(source, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match="does not wrap"):
        converted(source)


@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_a7_a_factor_without_its_partner(factor: str, source: Path, converted: Any) -> None:
    name = f"base_model.model.model.layers.1.self_attn.v_proj.{factor}.weight"
    edit_tensors(source, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(AdapterError, match=rf"no `{factor}` for `model\.layers\.1\.self_attn\.v_proj`"):
        converted(source)


@pytest.mark.parametrize(
    "extra", ["base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight", "optimizer.step", "x.lora_a.weight"]
)
def test_a7_an_unknown_tensor(extra: str, source: Path, converted: Any) -> None:
    edit_tensors(source, lambda tensors: tensors.__setitem__(extra, torch.zeros(2, 2)))
    with pytest.raises(AdapterError, match=extra):
        converted(source)


def test_a7_two_tensors_for_one_factor(source: Path, converted: Any) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    edit_tensors(source, lambda tensors: tensors.__setitem__(STANDARD + name, tensors[name].clone()))
    with pytest.raises(AdapterError, match="same factor"):
        converted(source)


def test_a7_several_adapters_in_one_file(source: Path, converted: Any) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {}
        for adapter in ("one", "two"):
            for name, tensor in tensors.items():
                named[name.replace(".weight", f".{adapter}.weight")] = tensor.clone()
        return named

    with pytest.raises(AdapterError, match="`one`, `two`"):
        converted(edit_tensors(source, add))


def test_a7_a_tensor_named_twice_in_the_header(source: Path, converted: Any) -> None:
    path = source / TENSORS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    entry = header[header.index(b'"base_model') : header.index(b"}", header.index(b'"base_model')) + 1]
    doubled = header[:-1] + b"," + entry + b"}"
    doubled += b" " * (-len(doubled) % 8)
    path.write_bytes(len(doubled).to_bytes(8, "little") + doubled + data[8 + length :])
    with pytest.raises(AdapterError, match="twice") as caught:
        converted(source)
    assert "column" in str(caught.value)


def test_a9_shapes_of_another_base_name_both(source: Path, bases: Any, converted: Any) -> None:
    with pytest.raises(BaseMismatchError) as caught:
        converted(edit_config(source, base_model_name_or_path=None), base=str(bases("wider")))
    assert "(4, 64)" in str(caught.value)
    assert "width 96" in str(caught.value)


def test_a9_fewer_layers_than_the_adapter_has(source: Path, bases: Any, converted: Any) -> None:
    with pytest.raises(AdapterError, match=r"layers\.2"):
        converted(edit_config(source, base_model_name_or_path=None), base=str(bases("shallower")))


def test_a9_another_vocabulary_under_a_head_site(bases: Any, tmp_path: Path, converted: Any) -> None:
    from tests.helpers.peft_lora import make_peft

    folder = make_peft(bases(), tmp_path / "peft", target_modules=["lm_head"])
    edit_config(folder, base_model_name_or_path=None)
    edit_tensors(folder, lambda tensors: {k: v for k, v in tensors.items() if "base_layer" not in k})
    with pytest.raises(BaseMismatchError, match="160"):
        converted(folder, base=str(bases("larger-vocabulary")))


def test_a_rank_that_contradicts_the_configuration_is_refused(source: Path, converted: Any) -> None:
    edit_config(source, rank_pattern={"q_proj": 8})
    with pytest.raises(AdapterError, match="rank 4") as caught:
        converted(source)
    assert "rank 8" in str(caught.value)
