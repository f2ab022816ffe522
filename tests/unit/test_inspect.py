"""`inspect_adapter`: what an adapter is, from its files alone, and how it fits a base."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.adapters.store import save_adapter
from preft.checks.inspect import inspect_adapter
from preft.errors import AdapterError, FileError
from tests.helpers.tiny import build_tiny, random_adapter


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    adapter = random_adapter(tiny_llama, seed=1, rank=(2, 5), targets=("q_proj", "up_proj"), blocks=(0, 2))
    save_adapter(adapter, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_sites_are_grouped_by_module(folder: Path) -> None:
    report = inspect_adapter(folder)
    groups = {group.module: group for group in report.groups}
    assert {name: group.count for name, group in groups.items()} == {"q_proj": 3, "up_proj": 3, "block output": 2}
    assert groups["block output"].kind == "block"
    assert groups["q_proj"].scales == (2.0,)
    assert sum(group.parameters for group in report.groups) * 4 == report.num_bytes
    assert report.file_bytes > report.num_bytes
    assert report.digest_verified
    assert report.base is None
    assert report.label == "LoRA+DiReFT(P)"


def test_the_report_is_json(folder: Path, tiny_llama: Path) -> None:
    document = json.loads(json.dumps(inspect_adapter(folder, base=str(tiny_llama)).to_dict()))
    assert document["manifest"]["digest"] == document["digest"]
    assert document["max_rank"] == 5
    assert document["base_match"]["fits"] is True


def test_its_own_base_matches(folder: Path, tiny_llama: Path) -> None:
    match = inspect_adapter(folder, base=str(tiny_llama)).base
    assert match is not None
    assert (match.result, match.missing_sites, match.fits) == ("match", (), True)


def test_other_weights_are_reported_not_raised(folder: Path, tmp_path: Path) -> None:
    match = inspect_adapter(folder, base=str(build_tiny(tmp_path / "other", seed=9))).base
    assert match is not None
    assert match.result == "weights differ"
    assert match.missing_sites == ()
    assert not match.fits


def test_another_architecture_is_reported_with_the_sites_it_lacks(folder: Path, tmp_path: Path) -> None:
    other = build_tiny(tmp_path / "other", num_hidden_layers=2, hidden_size=64, head_dim=16)
    match = inspect_adapter(folder, base=str(other)).base
    assert match is not None
    assert match.result == "another architecture"
    assert "hidden_size" in (match.detail or "")
    assert len(match.missing_sites) == 8


def test_a_base_without_weights_cannot_be_verified(folder: Path, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(tiny_llama / "config.json", tmp_path / "bare")
    match = inspect_adapter(folder, base=str(tmp_path / "bare")).base
    assert match is not None
    assert (match.result, match.fits) == ("unverified", True)


def test_a_recorded_override_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, targets=("q_proj",))
    base = replace(adapter.manifest.base, mismatch_allowed=True)
    save_adapter(Adapter.build(replace(adapter.manifest, base=base), adapter.tensors), tmp_path / "adapter")
    match = inspect_adapter(tmp_path / "adapter", base=str(build_tiny(tmp_path / "other", seed=9))).base
    assert match is not None
    assert "allows it" in (match.detail or "")


def test_head_and_zero_are_said(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, targets=("lm_head",))
    zero = {name: torch.zeros_like(tensor) for name, tensor in adapter.tensors.items()}
    save_adapter(Adapter.build(adapter.manifest, zero), tmp_path / "zero")
    report = inspect_adapter(tmp_path / "zero")
    assert report.moves_nothing
    assert "token 1" in (report.head_note or "")


@pytest.mark.parametrize("damage", ["tensors", "manifest", "missing", "file"])
def test_what_is_not_an_adapter_is_refused(damage: str, folder: Path) -> None:
    expected: Any = AdapterError
    if damage == "tensors":
        data = bytearray((folder / "preft.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "preft.safetensors").write_bytes(bytes(data))
    elif damage == "manifest":
        (folder / "preft.json").write_text("{")
    else:
        expected = FileError
        folder = folder / ("nothing" if damage == "missing" else "preft.json")
    with pytest.raises(expected):
        inspect_adapter(folder)
