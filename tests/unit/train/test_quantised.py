"""A base in 4 bits, as QLoRA has it: real where bitsandbytes is installed, refused with the reason elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from preft.adapters.fingerprint import fingerprint_base
from preft.config.train import QUANTISATIONS
from preft.data.collate import collate
from preft.errors import UnsupportedError, UsageError
from preft.positions import PROMPT
from preft.train.model import load_base, supervised_loss
from preft.tuners.layers import GatedLinear
from preft.tuners.trainable import extract_adapter, new_adapter, parameter_groups
from tests.unit.train.common import examples, gap, load

HAS_LIBRARY = importlib.util.find_spec("bitsandbytes") is not None


@pytest.mark.skipif(not HAS_LIBRARY, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(("kind", "alike"), [("nf4", 0.7), ("int8", 0.99)])
def test_an_adapter_learns_over_a_quantised_base(tiny_llama: Path, kind: str, alike: float) -> None:
    model = load_base(tiny_llama, dtype="float32", quantisation=kind)
    assert model.is_quantized
    batch = collate(examples(6), policy=PROMPT)
    tokens = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        base, exact = model(**tokens).logits, load(tiny_llama)(**tokens).logits
    # Like the base, and not the base; logits that have nothing in common are near 0.
    assert gap(base[:, -1], exact[:, -1]) > 1e-3
    assert float(torch.cosine_similarity(base[:, -1].flatten(), exact[:, -1].flatten(), dim=0)) > alike
    handle = new_adapter(model, fingerprint_base(tiny_llama), "mixed", 4)
    assert sum(isinstance(module, GatedLinear) for module in model.modules()) == 21
    with torch.no_grad():
        assert torch.equal(model(**tokens, preft_mask=batch["preft_mask"]).logits, base)
    optimizer = torch.optim.AdamW(parameter_groups(handle), lr=0.02)
    losses = []
    for _ in range(6):
        total, count = supervised_loss(model, batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    assert losses[-1] < losses[0] - 0.5
    assert not extract_adapter(handle).moves_nothing()


@pytest.mark.skipif(HAS_LIBRARY, reason="bitsandbytes is installed")
@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_without_the_library_it_is_refused(tiny_llama: Path, kind: str) -> None:
    with pytest.raises(UnsupportedError, match="bitsandbytes is not installed") as caught:
        load_base(tiny_llama, quantisation=kind)
    assert caught.value.accepted == "`train.quantisation: null`"


def test_an_unknown_kind_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="Unknown quantisation"):
        load_base(tiny_llama, quantisation="fp2")
