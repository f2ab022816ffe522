"""Generated adapters: one set of numbers in each arm's form, made once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from preft.adapters.store import load_adapter
from preft.bench.adapters import make_adapters
from preft.bench.facts import read_facts
from preft.bench.given import given_adapters, given_rank
from preft.errors import FileError, UsageError
from tests.helpers.tiny import build_tiny
from tests.unit.bench.common import spec_of


def test_each_arm_reads_the_same_numbers(tiny_llama: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("base", "stock-lora", "lora", "lorap", "direftp"), ranks=((4,),), direft_rank=2)
    paths = make_adapters(spec, tiny_llama)
    assert {key: len(found) for key, found in paths.items()} == dict.fromkeys(
        [(arm, (4,)) for arm in ("stock-lora", "lora", "lorap", "direftp")], 2
    )
    ours = [load_adapter(path) for path in paths["lorap", (4,)]]
    every = load_adapter(paths["lora", (4,)][0])
    assert (ours[0].manifest.label, every.manifest.label) == ("LoRAP", "LoRA")
    assert all(torch.equal(ours[0].tensors[name], every.tensors[name]) for name in ours[0].tensors)
    assert ours[0].digest != ours[1].digest
    assert len(ours[0].manifest.sites) == 3 * 7
    stock = load_file(paths["stock-lora", (4,)][0] / "adapter_model.safetensors")
    down = "base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"
    assert torch.equal(stock[down], ours[0].tensors["model.layers.2.mlp.down_proj.down"])
    assert len(stock) == 3 * 7 * 2
    config = json.loads((paths["stock-lora", (4,)][0] / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == ours[0].manifest.sites[0].scale
    assert "down_proj" in config["target_modules"]
    blocks = load_adapter(paths["direftp", (4,)][0])
    assert (blocks.manifest.label, blocks.manifest.max_rank, len(blocks.manifest.sites)) == ("DiReFTP", 2, 3)


def test_peft_reads_the_stock_form(tiny_llama: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spec = spec_of(tmp_path, arms=("stock-lora",), adapters=(1,), ranks=((4,),))
    (path,) = make_adapters(spec, tiny_llama)["stock-lora", (4,)]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), path)
    updates = [value for name, value in model.named_parameters() if "lora_B" in name]
    assert len(updates) == 21
    assert all(bool(value.any()) for value in updates)


def test_they_are_made_once_for_a_base_and_a_seed(tiny_llama: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("lorap",), ranks=((4,),))
    first = make_adapters(spec, tiny_llama)["lorap", (4,)]
    made = [path.stat().st_mtime_ns for path in first]
    again = make_adapters(replace(spec, adapters=(3,)), tiny_llama)["lorap", (4,)]
    assert again[:2] == first
    assert [path.stat().st_mtime_ns for path in first] == made
    assert len(again) == 3
    assert make_adapters(replace(spec, seed=1), tiny_llama)["lorap", (4,)] != first
    other = build_tiny(tmp_path / "other", seed=5)
    assert make_adapters(spec, other)["lorap", (4,)] != first


def test_what_is_known_of_a_model(tiny_llama: Path) -> None:
    facts = read_facts(tiny_llama, "auto")
    assert (facts.max_length, facts.vocab_size, facts.hidden_size, facts.num_blocks) == (512, 512, 128, 3)
    assert facts.kv_values_per_token == 2 * 3 * 2 * 32
    assert facts.value_bytes == 4
    assert read_facts(tiny_llama, "bfloat16").value_bytes == 2
    widths = 3 * (2 * 256 + 2 * 192 + 3 * 384)
    assert facts.linear_widths == widths
    assert facts.adapter_bytes("lorap", 8, 2) == 2 * 8 * widths
    assert facts.adapter_bytes("direftp", 8, 2) == 2 * 2 * 257 * 3
    assert facts.adapter_bytes("base", 8, 2) == 0


def test_mixed_ranks_and_chosen_targets(tiny_llama: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, arms=("lorap",), adapters=(3,), ranks=((2, 4),), targets="q_proj,v_proj")
    (paths,) = make_adapters(spec, tiny_llama).values()
    adapters = [load_adapter(path) for path in paths]
    assert [adapter.manifest.max_rank for adapter in adapters] == [2, 4, 2]
    assert {site.path.rpartition(".")[2] for site in adapters[0].manifest.sites} == {"q_proj", "v_proj"}
    attention = read_facts(tiny_llama, "auto", "attention").linear_widths
    assert attention == 3 * (2 * 256 + 2 * 192)
    whole = make_adapters(replace(spec, targets="all"), tiny_llama)["lorap", (2, 4)]
    assert len(load_adapter(whole[0]).manifest.sites) == 3 * 7


def test_adapters_of_ones_own(tiny_llama: Path, tmp_path: Path) -> None:
    made = make_adapters(
        spec_of(tmp_path, arms=("stock-lora", "lora", "lorap"), adapters=(3,), ranks=((2,),)), tiny_llama
    )
    given = {arm: made[arm, (2,)][0].parent for arm in ("stock-lora", "lorap")}
    spec = spec_of(tmp_path / "own", arms=("stock-lora", "lorap"), given=given, adapters=(2,))
    paths = make_adapters(spec, tiny_llama)
    assert paths["lorap", (16,)] == made["lorap", (2,)][:2]
    assert given_rank("lorap", paths["lorap", (16,)]) == given_rank("stock-lora", paths["stock-lora", (16,)]) == 2
    with pytest.raises(UsageError, match=r"holds too few adapters\n  got: 3\n  accepted: at least 4"):
        given_adapters(replace(spec, adapters=(4,)), "lorap")
    with pytest.raises(FileError, match="accepted: a folder of adapters"):
        given_adapters(replace(spec, given={"lorap": tmp_path / "nowhere"}), "lorap")
    with pytest.raises(UsageError, match="accepted: adapters that act on prompt tokens only"):
        given_adapters(replace(spec, given={"lorap": made["lora", (2,)][0].parent}), "lorap")
    for arm in given:
        again = tmp_path / f"twice-{arm}"
        for name in "ab":
            shutil.copytree(made[arm, (2,)][0], again / name)
        with pytest.raises(UsageError, match="hold the same numbers"):
            given_adapters(replace(spec, given={arm: again}), arm)
