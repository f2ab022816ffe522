"""New adapters: they start at the base model, learn under the rule, and come off as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from preft.adapters.fingerprint import BaseFingerprint, fingerprint_base
from preft.config.train import METHODS
from preft.data.collate import collate
from preft.errors import AdapterError, BaseMismatchError, UsageError
from preft.positions import Policy
from preft.train.model import score_examples, supervised_loss, token_loss
from preft.tuners.attach import AttachedModel, attach
from preft.tuners.layers import GatedBlock, GatedLinear
from preft.tuners.trainable import (
    adapter_state,
    extract_adapter,
    load_adapter_state,
    new_adapter,
    parameter_groups,
    trainable_parameters,
)
from preft.types import SiteKind
from tests.unit.train.common import EXACT, examples, gap, load

KINDS = [(method, False) for method in METHODS] + [("direftp", True), ("mixed", True)]


def _make(folder: Path, method: str, *, orthogonal: bool = False, **settings: Any) -> AttachedModel:
    base = fingerprint_base(folder)
    return new_adapter(load(folder), base, method, 4, orthogonal=orthogonal, **settings)


def _train(handle: AttachedModel, steps: int = 6, *, rate: float = 0.02, weight_decay: float = 0.0) -> list[float]:
    optimizer = torch.optim.AdamW(parameter_groups(handle, weight_decay=weight_decay), lr=rate)
    policy, losses = handle.policies["default"], []
    for _ in range(steps):
        total, count = supervised_loss(handle.model, collate(examples(6), policy=policy))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    return losses


def _logits(model: Any, policy: Policy) -> torch.Tensor:
    batch = collate(examples(3, seed=9), policy=policy)
    batch.pop("labels")
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits[batch["attention_mask"].bool()]


def _base_logits(folder: Path) -> torch.Tensor:
    batch = collate(examples(3, seed=9), policy=Policy("prompt"))
    attention = batch["attention_mask"]
    with torch.no_grad():
        logits: torch.Tensor = load(folder)(
            input_ids=batch["input_ids"], attention_mask=attention, position_ids=batch["position_ids"]
        ).logits
    return logits[attention.bool()]


@pytest.mark.parametrize(("method", "orthogonal"), KINDS)
def test_step_0_is_the_base_and_training_moves_it(tiny_llama: Path, method: str, orthogonal: bool) -> None:
    handle = _make(tiny_llama, method, orthogonal=orthogonal)
    policy = handle.policies["default"]
    assert policy.is_prompt_only == (method != "lora")
    assert torch.equal(_logits(handle.model, policy), _base_logits(tiny_llama))
    losses = _train(handle)
    assert losses[-1] < losses[0] - 0.5
    assert gap(_logits(handle.model, policy), _base_logits(tiny_llama)) > 0.1


@pytest.mark.parametrize(("method", "orthogonal"), KINDS)
def test_what_comes_off_is_what_was_trained(tiny_llama: Path, method: str, orthogonal: bool) -> None:
    handle = _make(tiny_llama, method, orthogonal=orthogonal)
    _train(handle, 3)
    policy = handle.policies["default"]
    want = _logits(handle.model, policy)
    adapter = extract_adapter(handle, provenance={"a": 1}, chat_template_sha256="0" * 64)
    handle.detach()
    assert torch.equal(_logits(_Bare(handle.model), policy), _base_logits(tiny_llama))
    again = load(tiny_llama)
    attach(again, adapter)
    assert gap(_logits(again, policy), want) == 0.0
    assert (adapter.manifest.provenance, adapter.manifest.chat_template_sha256) == ({"a": 1}, "0" * 64)


class _Bare:
    """A model without adapters takes no mask."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, preft_mask: torch.Tensor, **batch: torch.Tensor) -> Any:
        return self._model(**batch)


@pytest.mark.parametrize("method", ["lorap", "direftp", "mixed"])
def test_a_completion_token_gets_no_direct_delta(tiny_llama: Path, method: str) -> None:
    handle = _make(tiny_llama, method)
    _train(handle, 3)
    model: Any = handle.model
    batch = collate(examples(3, seed=9), policy=Policy("prompt"))
    batch.pop("labels")
    deltas: list[torch.Tensor] = []

    def record(module: Any, args: Any, output: torch.Tensor) -> None:
        before = module.get_base_layer()(args[0]) if isinstance(module, GatedLinear) else args[0]
        deltas.append((output - before).abs().amax(-1))

    for module in model.modules():
        if isinstance(module, GatedLinear | GatedBlock):
            module.register_forward_hook(record)
    with torch.no_grad():
        model(**batch)
    assert len(deltas) == {"lorap": 21, "direftp": 3, "mixed": 24}[method]
    adapted = batch["preft_mask"]
    unadapted = ~adapted & batch["attention_mask"].bool()
    assert int(unadapted.sum()) == 15
    assert min(float(delta[adapted].max()) for delta in deltas) > 0
    assert max(float(delta[~adapted].max()) for delta in deltas) == 0.0


def test_only_the_adapter_takes_gradients_and_it_is_float32(tiny_llama: Path) -> None:
    model = load(tiny_llama).to(torch.bfloat16)
    handle = new_adapter(model, fingerprint_base(tiny_llama), "mixed", 4, layers=[0, 2], targets=["q_proj"])
    parameters = trainable_parameters(handle)
    assert len(parameters) == 2 * 2 + 2 * 3
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in parameters.values()}
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    handle.use(None)
    assert not any(p.requires_grad for p in model.parameters())
    handle.use("default")
    assert all(p.requires_grad for p in parameters.values())
    assert [site.path for site in handle.adapters["default"].manifest.sites] == [
        "model.layers.0",
        "model.layers.0.self_attn.q_proj",
        "model.layers.2",
        "model.layers.2.self_attn.q_proj",
    ]
    assert extract_adapter(handle, dtype=torch.bfloat16).manifest.dtype == "bfloat16"


def test_a_seed_decides_the_start(tiny_llama: Path) -> None:
    first, same, other = (
        adapter_state(_make(tiny_llama, "lorap", seed=seed, targets=["q_proj"])) for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("method", "orthogonal"), [("lorap", False), ("direftp", True)])
def test_a_state_goes_back(tiny_llama: Path, method: str, orthogonal: bool) -> None:
    handle = _make(tiny_llama, method, orthogonal=orthogonal)
    _train(handle, 2)
    state, want = adapter_state(handle), extract_adapter(handle).digest
    _train(handle, 2)
    assert extract_adapter(handle).digest != want
    load_adapter_state(handle, state)
    assert extract_adapter(handle).digest == want
    state.pop(next(iter(state)))
    with pytest.raises(AdapterError, match="not the one being trained"):
        load_adapter_state(handle, state)


def test_weight_decay_leaves_an_orthogonal_matrix_alone(tiny_llama: Path) -> None:
    handle = _make(tiny_llama, "direftp", orthogonal=True)
    _train(handle, 4, weight_decay=0.5)
    adapter = extract_adapter(handle)
    for site in adapter.manifest.sites:
        up = adapter.site_tensors(site).up
        assert gap(up.T @ up, torch.eye(4)) < 1e-5
    assert not adapter.moves_nothing()


def test_weight_decay_on_it_is_noticed(tiny_llama: Path) -> None:
    """Negative control: this is what an optimiser's default does."""
    handle = _make(tiny_llama, "direftp", orthogonal=True)
    optimizer = torch.optim.AdamW(list(trainable_parameters(handle).values()), lr=0.01, weight_decay=0.01)
    total, _ = supervised_loss(handle.model, collate(examples(2), policy=Policy("prompt")))
    total.backward()
    optimizer.step()
    with pytest.raises(AdapterError, match="no longer orthogonal"):
        extract_adapter(handle)


def test_positions_and_scale_reach_the_manifest(tiny_llama: Path) -> None:
    handle = _make(tiny_llama, "lorap", positions=Policy.parse("f2+l2"), alpha=6, targets=["v_proj"])
    manifest = extract_adapter(handle).manifest
    assert str(manifest.positions) == "f2+l2"
    assert {(site.kind, site.rank, site.scale) for site in manifest.sites} == {(SiteKind.LINEAR, 4, 1.5)}


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("dora", {}, "Unknown method: `dora`"),
        ("lora", {"positions": Policy("prompt")}, "contradict the method `lora`"),
        ("lorap", {"positions": Policy("all")}, "contradict the method `lorap`"),
        ("lorap", {"orthogonal": True}, "`orthogonal` says nothing"),
        ("direftp", {"targets": ["q_proj"]}, "`direftp` adapts blocks"),
        ("lorap", {"targets": ["q_porj"]}, "`q_porj`"),
        ("lorap", {"layers": [3]}, "0 to 2"),
        ("lorap", {"layers": []}, "an empty list"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_llama: Path, method: str, settings: Any, message: str) -> None:
    model = load(tiny_llama)
    with pytest.raises(UsageError, match=message):
        new_adapter(model, fingerprint_base(tiny_llama), method, 4, **settings)
    assert not any(isinstance(module, GatedLinear | GatedBlock) for module in model.modules())


def test_another_architecture_is_refused(tiny_llama: Path) -> None:
    """A vocabulary that was resized in memory is one."""
    model = load(tiny_llama)
    base: BaseFingerprint = fingerprint_base(tiny_llama)
    model.resize_token_embeddings(520)
    with pytest.raises(BaseMismatchError, match="vocab_size"):
        new_adapter(model, base, "lorap", 4)


def test_the_loss_is_the_models_own(tiny_llama: Path) -> None:
    """The head runs on the last columns only; padding on either side gives one loss."""
    model = load(tiny_llama)
    found = []
    for side in ("left", "right"):
        batch = collate(examples(4), policy=Policy("prompt"), side=side)
        assert int((batch["attention_mask"] == 0).sum()) > 0
        batch.pop("preft_mask")
        total, count = supervised_loss(model, batch)
        found.append(float(total.detach()) / count)
    assert count == 20
    assert found[0] == pytest.approx(float(model(**batch).loss.detach()), abs=EXACT)
    assert found[0] == pytest.approx(found[1], abs=EXACT)


def test_an_exact_completion_is_what_greedy_decoding_gives(tiny_llama: Path) -> None:
    """Half of the completions are the adapter's own greedy answers, the others have one token changed."""
    handle = _make(tiny_llama, "lorap")
    _train(handle, 3)
    model: Any = handle.model.eval()
    found = []
    for index, example in enumerate(examples(6, seed=4)):
        prompt = torch.tensor([example.prompt_ids])
        output = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        completion = output[0, example.boundary :].tolist()
        completion[index] = completion[index] if index % 2 else 499 - completion[index]
        found.append(replace(example, completion_ids=tuple(completion)))
    scores = score_examples(model, found, policy=handle.policies["default"], batch_size=4)
    assert [score.is_exact for score in scores] == [False, True] * 3
    assert [score.id for score in scores] == [example.id for example in found]
    total, count = supervised_loss(model, collate(found, policy=handle.policies["default"]))
    assert token_loss(scores) == pytest.approx(float(total.detach()) / count, abs=EXACT)
