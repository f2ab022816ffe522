"""Checkpoints trained and saved by the real pyreft, converted, and run beside pyreft's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.adapters.store import load_adapter
from preft.convert.run import ConversionReport, convert
from preft.tuners.attach import attach
from tests.helpers.peft_lora import load_base

pytest.importorskip("pyreft", exc_type=ImportError)

from tests.helpers.pyreft_models import (
    build_reft,
    load_reft,
    locations,
    reft_logits,
    save_reft,
    train,
)

TOLERANCE = 2e-5
"""Logits up to 8, float32, two orders of summation in 3 blocks: differences of up to 5e-6 are seen."""
ALIVE = 0.1
"""How far pyreft's logits are from base's at least, so that equality cannot be that of two dead adapters."""
BFLOAT16_TOLERANCE = 0.05
"""Pyreft rounds the stream and the learned source's product to bfloat16 (8 bits) where the source is bfloat16."""
PROMPTS = (2, 3, 5, 7, 12)
"""Shorter and longer than the ends of `f3+l3` together, so that clamping is among them."""
CLASSES: dict[str, dict[str, Any]] = {
    "Direft": {},
    "Nodireft": {"add_bias": False},
    "Loreft": {},
    "Noreft": {"add_bias": True},
    "Consreft": {},
    "Lobireft": {},
}


@pytest.fixture
def base(bases: Callable[..., Path]) -> Path:
    return bases()


def converted(folder: Path, base: Path, positions: str = "prompt", **options: Any) -> tuple[ConversionReport, Adapter]:
    target = folder.with_name(f"{folder.name}-converted")
    report = convert(str(folder), target, base=str(base), positions=positions, **options)
    return report, load_adapter(target, expected_digest=report.manifest.digest)


def our_logits(base: Path, adapter: Adapter, ids: torch.Tensor, boundary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits under the adapter, and those of base."""
    model = load_base(base)
    handle = attach(model, adapter)
    with torch.no_grad():
        ours = model(input_ids=ids, preft_boundary=boundary).logits
        handle.use(None)
        return ours, model(input_ids=ids).logits


def assert_equals_pyreft(reft: Any, base: Path, adapter: Adapter, positions: str, tolerance: float = TOLERANCE) -> None:
    for length in PROMPTS:
        ids = torch.randint(3, 128, (2, length + 4), generator=torch.Generator().manual_seed(length))
        at = locations(positions, length)
        theirs = reft_logits(reft, ids, at)
        ours, plain = our_logits(base, adapter, ids, length)
        assert (theirs - plain).abs().max() > max(ALIVE, 100 * TOLERANCE), f"{length} tokens: the adapter is dead"
        assert (theirs - ours).abs().max() < tolerance, f"{length} tokens, adapted at {at}"


@pytest.mark.parametrize("positions", ["f3+l3", "l1", "f1", "prompt"])
@pytest.mark.parametrize("name", ["Direft", "Nodireft", "Loreft"])
def test_a19_a20_trained_checkpoints_equal_pyrefts_own_forward(
    name: str, positions: str, base: Path, tmp_path: Path
) -> None:
    reft = build_reft(base, name, **CLASSES[name])
    losses = train(reft, positions)
    assert losses[-1] < losses[0]

    report, adapter = converted(save_reft(reft, tmp_path / "reft"), base, positions)

    assert report.manifest.label == "DiReFTP"
    assert str(report.manifest.positions) == positions
    assert [(site.path, site.rank) for site in adapter.manifest.sites] == [("model.layers.0", 4), ("model.layers.2", 4)]
    assert not report.warnings
    assert_equals_pyreft(reft, base, adapter, positions)


@pytest.mark.parametrize("name", ["Noreft", "Consreft", "Lobireft"])
def test_relatives_equal_pyrefts_own_forward(name: str, base: Path, tmp_path: Path) -> None:
    reft = build_reft(base, name, **CLASSES[name])
    train(reft, "f2+l2")
    if name == "Lobireft":
        # A constant of 4 values moves little by itself.
        for intervention in reft.interventions.values():
            intervention.learned_source.data *= 4

    _, adapter = converted(save_reft(reft, tmp_path / "reft"), base, "f2+l2")

    assert_equals_pyreft(reft, base, adapter, "f2+l2")


def test_other_positions_would_be_noticed(base: Path, tmp_path: Path) -> None:
    """Negative control: the comparison fails under a policy the checkpoint was not run with."""
    reft = build_reft(base, "Direft")
    _, adapter = converted(save_reft(reft, tmp_path / "reft"), base, "f3")
    with pytest.raises(AssertionError, match="adapted at"):
        assert_equals_pyreft(reft, base, adapter, "f3+l3")


@pytest.mark.parametrize("name", ["Direft", "Nodireft", "Loreft"])
def test_pyrefts_own_loader_loses_what_conversion_keeps(name: str, base: Path, tmp_path: Path) -> None:
    """Loading a NoDiReFT fails in pyreft; a LoReFT or DiReFT comes back with a bfloat16 learned source."""
    reft = build_reft(base, name, **CLASSES[name])
    folder = save_reft(reft, tmp_path / "reft")
    if name == "Nodireft":
        with pytest.raises(KeyError, match="add_bias"):
            load_reft(folder, base)
    else:
        loaded = next(iter(load_reft(folder, base).interventions.values()))
        assert loaded.learned_source.weight.dtype == torch.bfloat16

    _, adapter = converted(folder, base)

    assert_equals_pyreft(reft, base, adapter, "prompt")


@pytest.mark.parametrize(("name", "dtype"), [("Direft", "float32"), ("Nodireft", "bfloat16")])
def test_a19_bfloat16_sources_are_held_exactly(name: str, dtype: str, base: Path, tmp_path: Path) -> None:
    """Pyreft's default: a bfloat16 learned source beside a float32 rotation."""
    reft = build_reft(base, name, **{**CLASSES[name], "dtype": torch.bfloat16})
    report, adapter = converted(save_reft(reft, tmp_path / "reft"), base)

    assert adapter.manifest.dtype == dtype
    for intervention, site in zip(reft.interventions.values(), adapter.manifest.sites, strict=True):
        numbers = adapter.site_tensors(site)
        assert torch.equal(numbers.down.float(), intervention.learned_source.weight.float())
        assert torch.equal(numbers.bias.float(), intervention.learned_source.bias.float())
    if name == "Direft":
        assert any("learned source is bfloat16" in note for note in report.notes)
        assert_equals_pyreft(reft, base, adapter, "prompt", BFLOAT16_TOLERANCE)
    for intervention in reft.interventions.values():
        intervention.float()
    assert_equals_pyreft(reft, base, adapter, "prompt")


def test_the_orthogonal_matrix_is_materialised_in_float64(base: Path, tmp_path: Path) -> None:
    reft = build_reft(base, "Direft", layers=(1,), rank=6)
    train(reft, "prompt", steps=8)
    _, adapter = converted(save_reft(reft, tmp_path / "reft"), base)

    rotate = next(iter(reft.interventions.values())).rotate_layer
    theirs = rotate.weight.detach()
    exact = rotate.double().weight.detach()
    ours = adapter.site_tensors(adapter.manifest.sites[0]).up
    assert torch.equal(ours, exact.float())
    assert (ours - theirs).abs().max() < 1e-6
    assert (ours.T @ ours - torch.eye(6)).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["Direft", "Loreft"])
def test_a19_an_adapter_zeroed_by_weight_decay_moves_nothing(name: str, base: Path, tmp_path: Path) -> None:
    reft = build_reft(base, name)
    train(reft, "prompt", steps=3, weight_decay=0.01)
    assert all(not intervention.rotate_layer.weight.any() for intervention in reft.interventions.values())

    report, adapter = converted(save_reft(reft, tmp_path / "reft"), base)

    assert adapter.moves_nothing()
    assert any("moves nothing" in warning for warning in report.warnings)
    assert any("weight decay" in warning and "8 of 8 directions" in warning for warning in report.warnings)
    ids = torch.arange(3, 12)[None]
    ours, plain = our_logits(base, adapter, ids, 5)
    assert torch.equal(ours, plain)
    assert (reft_logits(reft, ids, range(5)) - plain).abs().max() < TOLERANCE


def test_a_module_named_by_its_path_is_the_same_block(base: Path, tmp_path: Path) -> None:
    reft = build_reft(base, "Direft", layers=(1,), component="model.layers[%d].output")
    _, adapter = converted(save_reft(reft, tmp_path / "reft"), base)
    assert [site.path for site in adapter.manifest.sites] == ["model.layers.1"]
    assert_equals_pyreft(reft, base, adapter, "prompt")


def test_gpt2_blocks_are_found(bases: Callable[..., Path], tmp_path: Path) -> None:
    base = bases("gpt2")
    reft = build_reft(base, "Nodireft", layers=(1,), add_bias=False)
    _, adapter = converted(save_reft(reft, tmp_path / "reft"), base, "l2")
    assert [site.path for site in adapter.manifest.sites] == ["transformer.h.1"]
    ids = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(0))
    ours, plain = our_logits(base, adapter, ids, 6)
    theirs = reft_logits(reft, ids, [4, 5])
    assert (theirs - plain).abs().max() > 1e-3 > TOLERANCE > (theirs - ours).abs().max()


def test_the_report_says_what_is_assumed(base: Path, tmp_path: Path) -> None:
    report, adapter = converted(save_reft(build_reft(base, "Direft"), tmp_path / "reft"), base)
    assert any("linear activation is assumed" in note for note in report.notes)
    assert adapter.manifest.provenance["assumed_activation"] == "linear"
    assert adapter.manifest.provenance["interventions"] == {"DireftIntervention": 2}
