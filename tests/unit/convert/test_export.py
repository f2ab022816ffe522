"""Back to PEFT: acknowledged, exact by site, and loaded by the real PEFT to equal logits."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.adapters.store import save_adapter
from preft.convert.export import export_peft
from preft.convert.run import convert
from preft.errors import FileError, UnsupportedError, UsageError
from tests.helpers.peft_lora import CONFIG, make_peft, peft_logits, peft_sites, site_logits
from tests.helpers.tiny import random_adapter

# Two float32 evaluations of one formula, differing in the order of additions.
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {r".*layers\.0\..*": 3, "q_proj": 17},
        "alpha_pattern": {"q_proj": 5},
    },
    "rslora": {"use_rslora": True, "r": 6, "lora_alpha": 9, "rank_pattern": {"v_proj": 5}},
    "odd alpha": {"lora_alpha": 7.3, "r": 3},
    "head": {"target_modules": ["lm_head", "o_proj"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact(name: str, bases: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    source = make_peft(bases(), tmp_path / "peft", **CONFIGS[name])
    first = convert(str(source), tmp_path / "one", positions="all")
    report = export_peft(tmp_path / "one", tmp_path / "back", as_all_token=True)
    assert report.num_sites == len(first.manifest.sites)
    assert report.to_dict()["format"] == "peft"
    assert peft_sites(bases(), tmp_path / "back") == peft_sites(bases(), source)
    theirs, ours = (peft_logits(bases(), folder, ids) for folder in (source, tmp_path / "back"))
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    second = convert(str(tmp_path / "back"), tmp_path / "two", positions="all")
    assert second.manifest.digest == first.manifest.digest


def test_ranks_and_scales_that_only_patterns_can_say(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tiny_llama, seed=1, rank=(1, 2, 7), targets=("q_proj", "up_proj"), scale=1 / 3)
    sites = tuple(replace(site, scale=math.pi / (index + 1)) for index, site in enumerate(adapter.manifest.sites))
    adapter = Adapter.build(replace(adapter.manifest, sites=sites, digest=""), adapter.tensors)
    save_adapter(adapter, tmp_path / "ours")
    export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=True)
    found = peft_sites(tiny_llama, tmp_path / "back")
    assert set(found) == {site.path for site in sites}
    for site in sites:
        rank, scale = found[site.path]
        assert rank == site.rank
        assert scale == pytest.approx(site.scale, rel=1e-15)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(
        peft_logits(tiny_llama, tmp_path / "back", ids), site_logits(tiny_llama, adapter, ids), atol=2e-3, rtol=1e-4
    )


def test_patterns_name_one_module_each(bases: Any, tmp_path: Path) -> None:
    source = make_peft(bases(), tmp_path / "peft", **CONFIGS["patterns"])
    convert(str(source), tmp_path / "one")
    export_peft(tmp_path / "one", tmp_path / "back", as_all_token=True)
    config = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert all(key.startswith("^") and r"\." in key for key in config["rank_pattern"])
    assert config["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("positions", ["prompt", "f2+l2"])
def test_what_changes_must_be_acknowledged(positions: str, source: Path, tmp_path: Path) -> None:
    convert(str(source), tmp_path / "ours", positions=positions)
    with pytest.raises(UsageError, match="every token") as caught:
        export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=False)
    assert "--as-all-token" in (caught.value.hint or "")
    assert not (tmp_path / "back").exists()
    report = export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=True)
    assert any(positions in note for note in report.notes)


def test_an_all_token_adapter_changes_nothing_and_needs_no_acknowledgement(source: Path, tmp_path: Path) -> None:
    convert(str(source), tmp_path / "ours", positions="all")
    assert export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=False).notes == ()


def test_block_sites_have_no_form_in_peft(tiny_llama: Path, tmp_path: Path) -> None:
    save_adapter(random_adapter(tiny_llama, seed=1, blocks=(0, 2)), tmp_path / "ours")
    with pytest.raises(UnsupportedError, match="DiReFT"):
        export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=True)
    assert not (tmp_path / "back").exists()


def test_a_taken_target_needs_force_and_must_be_a_peft_folder(source: Path, tmp_path: Path) -> None:
    convert(str(source), tmp_path / "ours", positions="all")
    export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=True)
    with pytest.raises(UsageError, match="not empty"):
        export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=True)
    export_peft(tmp_path / "ours", tmp_path / "back", as_all_token=True, force=True)
    with pytest.raises(UsageError, match="does not replace"):
        export_peft(tmp_path / "ours", tmp_path / "ours", as_all_token=True, force=True)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_half_way_leaves_nothing(
    failure: BaseException, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(source), tmp_path / "ours", positions="all")

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises((FileError, KeyboardInterrupt)):
        export_peft(tmp_path / "ours", tmp_path / "out" / "back", as_all_token=True)
    assert list((tmp_path / "out").iterdir()) == []
