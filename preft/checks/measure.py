"""Measurements on a Transformers model with an adapter in use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from preft.adapters.adapter import Adapter
from preft.checks.report import DecodeProof, SiteDelta
from preft.positions import Policy
from preft.serve.hf_engine import HFEngine
from preft.tuners.layers import GatedBlock, GatedLinear
from preft.types import Site, SiteKind

Prompt = tuple[int, ...]


def last_logits(engine: HFEngine, name: str | None, prompt: Prompt) -> torch.Tensor:
    """Logits [V] after the last prompt token, under an adapter or, for None, the base."""
    engine.use(name)
    with torch.inference_mode():
        logits: torch.Tensor = engine.model(input_ids=_ids(engine, prompt), **_boundary(name, prompt)).logits
    return logits[0, -1].float()


def top2_gap(engine: HFEngine, name: str | None, tokens: Sequence[int], boundary: int) -> float:
    """Top-2 logit gap after `tokens`, in one forward pass."""
    engine.use(name)
    extra = {} if name is None else {"preft_boundary": boundary}
    with torch.inference_mode():
        logits = engine.model(input_ids=_ids(engine, tokens), **extra).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return float(best - second)


def kl_nats(adapted: torch.Tensor, base: torch.Tensor) -> float:
    """KL(adapted || base) of two next-token predictions, given as logits [V]."""
    first, second = adapted.log_softmax(-1), base.log_softmax(-1)
    return float((first.exp() * (first - second)).sum())


def site_deltas(engine: HFEngine, name: str, adapter: Adapter, prompts: Sequence[Prompt]) -> tuple[SiteDelta, ...]:
    """How much each site moves over the prompts."""
    engine.use(name)
    sums = {(site.path, site.kind): [0.0, 0.0] for site in adapter.manifest.sites}
    handles = []
    adapted: list[torch.Tensor] = []
    for site in adapter.manifest.sites:
        module = _layer(engine.model, site)
        handles.append(module.register_forward_hook(_observer(sums[site.path, site.kind], adapted)))
    try:
        with torch.inference_mode():
            for prompt in prompts:
                adapted[:] = [_mask(adapter.manifest.positions, prompt, engine.model.device)]
                engine.model(input_ids=_ids(engine, prompt), **_boundary(name, prompt))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(
        SiteDelta(site.path, site.kind.value, site.rank, _ratio(*sums[site.path, site.kind]))
        for site in adapter.manifest.sites
    )


def decode_proof(engine: HFEngine, name: str, adapter: Adapter, prompt: Prompt) -> DecodeProof:
    """Counts the adapter's matrix products in prefill and decode, and compares a decode step with the base's."""
    engine.use(name)
    calls: list[None] = []
    handles = [
        container[name_in_layer].register_forward_hook(lambda *_: calls.append(None))
        for container, name_in_layer in _products(engine.model, adapter)
    ]
    try:
        with torch.inference_mode():
            boundary = _boundary(name, prompt)
            output = engine.model(input_ids=_ids(engine, prompt), use_cache=True, **boundary)
            in_prefill = len(calls)
            twin = copy.deepcopy(output.past_key_values)
            token = (int(output.logits[0, -1].argmax()),)
            cache = output.past_key_values
            own = engine.model(input_ids=_ids(engine, token), past_key_values=cache, **boundary).logits
            in_decode = len(calls) - in_prefill
            engine.use(None)
            base = engine.model(input_ids=_ids(engine, token), past_key_values=twin).logits
    finally:
        for handle in handles:
            handle.remove()
    equals = torch.equal(own, base) if adapter.manifest.positions.is_prompt_only else None
    return DecodeProof(in_prefill, in_decode, equals)


def _ids(engine: HFEngine, tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)], device=engine.model.device)


def _boundary(name: str | None, prompt: Prompt) -> dict[str, int]:
    return {} if name is None else {"preft_boundary": len(prompt)}


def _mask(policy: Policy, prompt: Prompt, device: torch.device) -> torch.Tensor:
    return torch.tensor(policy.mask(len(prompt), 0, len(prompt)), device=device)


def _layer(model: Any, site: Site) -> Any:
    module = model.get_submodule(site.path)
    if site.kind is SiteKind.LINEAR:
        return module
    return next(child for child in module.children() if isinstance(child, GatedBlock))


def _observer(sums: list[float], adapted: list[torch.Tensor]) -> Callable[..., None]:
    """A forward hook that adds up squared norms of update and base output over the adapted tokens."""

    def observe(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        base = module.base_layer(args[0]) if isinstance(module, GatedLinear) else args[0]
        rows = adapted[0]
        sums[0] += float((output - base)[:, rows].double().square().sum())
        sums[1] += float(base[:, rows].double().square().sum())

    return observe


def _ratio(delta: float, base: float) -> float:
    return float((delta / base) ** 0.5) if base > 0 else 0.0


def _products(model: Any, adapter: Adapter) -> list[tuple[Any, str]]:
    """The `down` and `up` modules of every site, as containers and the adapter's name in them."""
    found = []
    for site in adapter.manifest.sites:
        layer = _layer(model, site)
        containers = (
            (layer.lora_A, layer.lora_B) if isinstance(layer, GatedLinear) else (layer.preft_down, layer.preft_up)
        )
        found += [(container, key) for container in containers for key in container]
    return found
