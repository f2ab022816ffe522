"""Every decoder class of the table, on a tiny random model: the engine's answers are the oracles'.

A few families run by default, one for each residual convention and each way that a model's modules are wrapped; all
run with `--full`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.adapter import Adapter
from preft.errors import UnsupportedError
from preft.serve.engine import Engine
from preft.tuners.attach import attach
from tests.helpers.engines import Oracle, open_engine, prompt_of, request_of, save_all
from tests.helpers.families import BLOOM, FAMILIES, OLMO2, Family, build_family, family_adapter
from tests.helpers.oracle import masked_logits

pytestmark = pytest.mark.engine

DEFAULT = ("qwen3", "gemma2", "phi3", "cohere", "granite", "stablelm", "falcon", "qwen3_moe")
TOKENS = 12
LOGIT_TOLERANCE = 1e-4
"""Logits of up to 50 in float32, the update masked in one and gathered in the other."""


@pytest.fixture
def build(tmp_path: Path) -> Callable[[Family], Path]:
    return lambda family: build_family(family, tmp_path / "model")


def build_oracle(base: Path, adapters: dict[str, Adapter]) -> Oracle:
    """The oracle, with attention that honours soft caps, which the default one leaves out without a word."""
    oracle = Oracle(base, adapters)
    oracle.model.set_attn_implementation("eager")
    return oracle


def vllm_model(engine: Engine) -> Any:
    return engine._core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def decoder_class(engine: Engine) -> str:
    """Module and class of vLLM's own decoder layer, below the one that was swapped in."""
    from preft.serve.backend.sites import BlockSite

    layer = next(
        module for module in vllm_model(engine).modules() if isinstance(getattr(module, "preft_site", None), BlockSite)
    )
    base = type(layer).__mro__[1]
    return f"{base.__module__.rpartition('.')[2]}.{base.__name__}"


def batch_of(adapters: dict[str, Adapter], names: list[str | None]) -> list[Any]:
    return [request_of(f"{name}", prompt_of(i, 50 + 9 * i), name, tokens=TOKENS) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_a_family_equals_both_oracles(
    name: str, build: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preft.serve.backend.sites import BlockSite

    family = FAMILIES[name]
    base = build(family)
    adapters = {
        "lorap": family_adapter(base, family, seed=1, linear=True),
        "direftp": family_adapter(base, family, seed=2, blocks=True),
        "mixed": family_adapter(base, family, seed=3, linear=True, blocks=True, positions="f5+l7"),
        "all": family_adapter(base, family, seed=4, blocks=True, positions="all"),
    }
    assert all(adapter.manifest.sites for adapter in adapters.values())
    served = list(adapters)
    if family.refused:
        adapters["refused"] = family_adapter(base, family, seed=5, linear=True, targets=family.refused)
    oracle = build_oracle(base, adapters)
    batch = batch_of(adapters, [None, *served])
    oracle.require_adapters_matter(batch)
    apply = BlockSite.apply

    def apply_checked(self: BlockSite, output: Any) -> Any:
        tensors = [part for part in output if isinstance(part, torch.Tensor)] if isinstance(output, tuple) else [output]
        assert len({part.data_ptr() for part in tensors}) == len(tensors), "the site would write into both"
        return apply(self, output)

    monkeypatch.setattr(BlockSite, "apply", apply_checked)
    with open_engine(base, save_all(tmp_path / "adapters", adapters), slots=3) as engine:
        assert decoder_class(engine) == family.decoder_layer
        oracle.require_equal(batch, engine.generate(batch))
        if family.refused:
            result = engine.generate([request_of("refused", prompt_of(1, 40), "refused")])[0]
            assert result.error is not None
            assert f"takes no linear site at `{adapters['refused'].manifest.sites[0].path}`" in result.error["got"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_hugging_face_path_equals_the_oracle(name: str, build: Callable[[Family], Path]) -> None:
    family = FAMILIES[name]
    base = build(family)
    adapter = family_adapter(base, family, seed=3, linear=True, blocks=True, positions="f5+l7")
    oracle = build_oracle(base, {"mixed": adapter})
    ids = prompt_of(1, 40)
    expected = masked_logits(oracle.model, oracle.specs["mixed"], ids, 30)
    plain = masked_logits(oracle.model, None, ids, 30)

    attach(oracle.model, adapter)
    with torch.no_grad():
        found = oracle.model(input_ids=torch.tensor([ids]), preft_boundary=30).logits[0]

    assert (expected - plain).abs().max() > 1000 * LOGIT_TOLERANCE
    assert (found - expected).abs().max() < LOGIT_TOLERANCE


def test_every_class_of_the_table_has_a_family() -> None:
    from preft.serve.backend.decoder_layers import DECODER_LAYERS

    assert {family.decoder_layer for family in FAMILIES.values()} == set(DECODER_LAYERS)


@pytest.mark.parametrize(
    ("name", "wrong"), [("llama", "first"), pytest.param("stablelm", "sum", marks=pytest.mark.full)]
)
def test_a_wrong_convention_would_be_noticed(
    name: str, wrong: str, build: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the residual stream read from the wrong part of the output."""
    from preft.serve.backend.decoder_layers import DECODER_LAYERS, Residual

    family = FAMILIES[name]
    monkeypatch.setitem(DECODER_LAYERS, family.decoder_layer, Residual(wrong))
    base = build(family)
    adapters = {"direftp": family_adapter(base, family, seed=2, blocks=True)}
    oracle = build_oracle(base, adapters)
    batch = batch_of(adapters, [None, "direftp"])
    with open_engine(base, save_all(tmp_path / "adapters", adapters)) as engine:
        results = engine.generate(batch)
    oracle.require_equal(batch[:1], results[:1])
    with pytest.raises(AssertionError, match="direftp"):
        oracle.require_equal(batch, results)


def test_an_unknown_class_is_refused_by_name_and_linear_sites_are_served(
    build: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preft.serve.backend.decoder_layers import DECODER_LAYERS

    family = FAMILIES["llama"]
    monkeypatch.delitem(DECODER_LAYERS, family.decoder_layer)
    base = build(family)
    adapters = {
        "lorap": family_adapter(base, family, seed=1, linear=True),
        "direftp": family_adapter(base, family, seed=2, blocks=True),
        "mixed": family_adapter(base, family, seed=3, linear=True, blocks=True),
    }
    oracle = build_oracle(base, adapters)
    batch = batch_of(adapters, [None, "lorap", "direftp", "mixed"])
    with open_engine(base, save_all(tmp_path / "adapters", adapters)) as engine:
        results = engine.generate(batch)
    oracle.require_equal(batch[:2], results[:2])
    for result in results[2:]:
        assert result.error is not None
        assert "no block site at `model.layers.0`" in result.error["got"]
        assert "`LlamaDecoderLayer`" in result.error["got"]


def test_a_model_without_lora_support_serves_block_sites(
    build: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that vLLM does not declare and preft does not list: its linear modules are refused by name."""
    from preft.serve.backend import lora_support

    family = FAMILIES["gpt2"]
    monkeypatch.setattr(lora_support, "FUSED", {})
    base = build(family)
    adapters = {
        "lorap": family_adapter(base, family, seed=1, linear=True),
        "direftp": family_adapter(base, family, seed=2, blocks=True),
    }
    oracle = build_oracle(base, adapters)
    batch = batch_of(adapters, [None, "direftp", "lorap"])
    with open_engine(base, save_all(tmp_path / "adapters", adapters)) as engine:
        results = engine.generate(batch)
    oracle.require_equal(batch[:2], results[:2])
    assert results[2].error is not None
    assert "vLLM has no LoRA support for `GPT2LMHeadModel`" in results[2].error["got"]


def test_a_model_that_takes_no_site_at_all_is_refused_at_start(build: Callable[[Family], Path]) -> None:
    with pytest.raises(UnsupportedError, match="No module of `BloomForCausalLM` takes adapters"):
        open_engine(build(BLOOM), {})


@pytest.mark.full
def test_a_model_on_transformers_modules_serves_linear_sites(build: Callable[[Family], Path], tmp_path: Path) -> None:
    base = build(OLMO2)
    adapters = {
        "lorap": family_adapter(base, OLMO2, seed=1, linear=True),
        "direftp": family_adapter(base, OLMO2, seed=2, blocks=True),
    }
    oracle = build_oracle(base, adapters)
    batch = batch_of(adapters, [None, "lorap", "direftp"])
    # Before the engine starts: vLLM changes the Transformers classes of this process.
    expected = [oracle.two_phase(request).tokens for request in batch]
    oracle.require_adapters_matter(batch)
    with open_engine(base, save_all(tmp_path / "adapters", adapters)) as engine:
        results = engine.generate(batch)
    assert [result.token_ids for result in results[:2]] == expected[:2]
    assert results[2].error is not None
    assert "Olmo2DecoderLayer" in results[2].error["got"]
