"""What training will rest on: gradients under checkpointing, and PEFT's own way of making layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from preft.errors import BoundaryUnknownError, UnsupportedError
from preft.positions import Policy
from preft.tuners.attach import attach
from preft.tuners.gate import PositionGate
from preft.tuners.layers import GatedLinear
from preft.tuners.masks import batch_mask
from tests.helpers.tiny import random_adapter
from tests.unit.tuners.common import MOVES, PROMPTS, gap, ids, load, padded


def _gradients(model: Any, batches: list[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> list[torch.Tensor]:
    """Gradients of two losses summed, whose forward passes have different masks."""
    model.zero_grad()
    losses = []
    for batch, mask in batches:
        logits = model(**batch, preft_mask=mask, use_cache=False).logits
        losses.append(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()))
    sum(losses).backward()  # type: ignore[union-attr]
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


def _batches() -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    found = []
    for boundaries in ([12, 3, 9], [2, 7, 5]):
        batch = padded(list(PROMPTS), "right")
        found.append((batch, batch_mask(Policy.parse("prompt"), boundaries, batch["attention_mask"])))
    return found


def _trainable(tiny_llama: Path) -> Any:
    model = load(tiny_llama)
    attach(model, random_adapter(tiny_llama, seed=3, blocks=(1,), strength=0.05))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "preft_" in name)
    return model.train()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(tiny_llama: Path, use_reentrant: bool) -> None:
    model = _trainable(tiny_llama)
    want = _gradients(model, _batches())
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    got = _gradients(model, _batches())

    assert len(want) == 2 * 21 + 3
    assert min(float(gradient.abs().max()) for gradient in want) > 0
    assert max(gap(first, second) for first, second in zip(want, got, strict=True)) < 1e-6


def test_a_mask_that_lives_beside_the_forward_pass_would_not_survive_checkpointing(tiny_llama: Path) -> None:
    """Negative control: recomputation happens after the second forward pass has replaced such a mask."""
    model = _trainable(tiny_llama)
    gate = model.model.layers[0].self_attn.q_proj.preft_gate
    latest: list[Any] = []
    enter_model, enter_block = gate._enter_model, gate._enter_block

    def remember(module: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = enter_model(module, args, kwargs)
        latest[:] = [kwargs.pop("preft_step")]
        return args, kwargs

    def recall(module: Any, args: Any, kwargs: Any) -> Any:
        return enter_block(module, args, {**kwargs, "preft_step": latest[0]})

    for module, own, other in [(model, enter_model, remember)] + [
        (block, enter_block, recall) for block in model.model.layers
    ]:
        for key, hook in module._forward_pre_hooks.items():
            if hook == own:
                module._forward_pre_hooks[key] = other
    want = _gradients(model, _batches())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    got = _gradients(model, _batches())
    assert max(gap(first, second) for first, second in zip(want, got, strict=True)) > 1e-3


def test_an_update_that_no_gradient_checkpoint_was_told_of_is_refused(tiny_llama: Path) -> None:
    """An architecture that drops keyword arguments on the way to its blocks fails loudly when a block runs again."""
    model = _trainable(tiny_llama)
    for block in model.model.layers:
        block.register_forward_pre_hook(
            lambda _module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "preft_step"}),
            with_kwargs=True,
            prepend=True,
        )
    plain = _gradients(model, _batches())
    assert len(plain) == 45
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    with pytest.raises(BoundaryUnknownError):
        _gradients(model, _batches())


def test_pefts_own_machinery_makes_the_same_layers(tiny_llama: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=16
    )
    config._register_custom_module({nn.Linear: GatedLinear})
    plain = load(tiny_llama)
    torch.manual_seed(0)
    model = get_peft_model(load(tiny_llama), config).eval()
    gate = PositionGate(model.base_model.model, {"default": Policy.parse("prompt")})
    with pytest.raises(BoundaryUnknownError, match="no gate"):
        model(input_ids=ids(PROMPTS[0]))
    gate.bind()
    tokens = ids(PROMPTS[0])
    with torch.no_grad():
        base = plain(input_ids=tokens).logits
        assert torch.equal(model(input_ids=tokens, preft_boundary=0).logits, base)
        assert gap(model(input_ids=tokens, preft_boundary=21).logits, base) > MOVES
        assert model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] <= 24
        with model.disable_adapter():
            assert torch.equal(model(input_ids=tokens).logits, base)
        with pytest.raises(BoundaryUnknownError):
            model(input_ids=tokens)
    with pytest.raises(UnsupportedError, match="cannot be merged"):
        model.merge_and_unload()


def test_lora_variants_are_refused(tiny_llama: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    config._register_custom_module({nn.Linear: GatedLinear})
    with pytest.raises(UnsupportedError, match="Dora"):
        get_peft_model(load(tiny_llama), config)
