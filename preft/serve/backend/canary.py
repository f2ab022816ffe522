"""The proof that adapters act on this worker: a synthetic adapter must move the model, and only where it should.

Three forward passes over the same tokens: without adapter, with a random adapter at every site on the first half of
the rows, and without again. Every site must have been called, the outputs must differ, and the third pass must equal
the first exactly. A compiled model must also move as its own Python moves it, over the same tokens and weights, and
each kind of site must move it alone. An engine that fails this is not ready.

A warm-up pass attends to an empty cache, where nothing of q, k and v would show. So for these passes attention adds
them up instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from preft.errors import EngineError
from preft.serve.backend import compiled
from preft.serve.backend.packing import ModuleInfo
from preft.serve.backend.runner import PreftCPUModelRunner
from preft.serve.backend.sites import PackedAdapter
from preft.serve.backend.step_rows import NO_ROWS, StepRows
from preft.types import SiteKind
from preft_kernels.packed import PackedSite, UpPart
from preft_kernels.rows import Run

_TOKENS = 16
_CANARY = -1
_RANK = 4
_ROUNDINGS, _MOST = 256, 0.25
"""How far a compiled model may deviate, in roundings of its type and at most. Compiled kernels keep intermediate values
that the model's own Python rounds: 5 roundings were seen in float32 and 2 in 16 bits on three layers, and they add up
over layers. A kind of site that is lost is found by its own pass, exactly."""


@dataclass(frozen=True)
class CanaryResult:
    """What the canary found on one worker.

    Attributes:
        num_sites: Sites that were called.
        moved: Largest absolute change of the last hidden state.
        restored: Whether the pass after it equals the pass before it exactly.
        deviation: Of a compiled model: by how much its move differs from that of its own Python, as a part of it.
    """

    num_sites: int
    moved: float
    restored: bool
    deviation: float | None = None


@dataclass(frozen=True)
class _Passes:
    """Last hidden states [tokens, D] of three passes: before, under, and after the canary's adapter."""

    before: torch.Tensor
    during: torch.Tensor
    after: torch.Tensor
    called: dict[int, int]

    @property
    def move(self) -> torch.Tensor:
        """What the adapter changed."""
        return self.during - self.before


def run_canary(runner: PreftCPUModelRunner, dtype: torch.dtype) -> CanaryResult:
    """Runs the canary.

    Args:
        runner: Of this worker; its step state is left without adapters.
        dtype: Of the canary's numbers.

    Raises:
        EngineError: A site was not called, nothing moved, or base did not come back.
    """
    found = _three_passes(runner, dtype)
    infos = runner.preft_manager.infos
    silent = [info.name for info in infos if not info.name.endswith("lm_head") and not found.called.get(info.index)]
    moved = float(found.move.abs().max())
    restored = torch.equal(found.before, found.after)
    if silent or not moved > 0 or not restored:
        raise EngineError(
            "The canary adapter did not act as it must, so no adapter can be trusted on this engine",
            got=f"{len(silent)} silent sites {silent[:3]}, moved {moved:.3g}, base restored: {restored}",
            accepted="every site called, outputs moved, base restored exactly",
        )
    return CanaryResult(len(found.called), moved, restored, _deviation(runner, dtype, found))


def _deviation(runner: PreftCPUModelRunner, dtype: torch.dtype, found: _Passes) -> float | None:
    """Compares a compiled model with its own Python; None if it is not compiled.

    Raises:
        EngineError: They do not agree.
    """
    model = runner.get_model()
    if not compiled.compiled_modules(model):
        return None
    moving = [kind for kind in _kinds(runner) if not torch.equal(_under(runner, dtype, kind), found.before)]
    with compiled.not_compiled(model):
        expected = _three_passes(runner, dtype)
        seen = [kind for kind in _kinds(runner) if not torch.equal(_under(runner, dtype, kind), expected.before)]
    if moving != seen:
        raise EngineError(
            "What an adapter adds is lost in the compiled model",
            got=", ".join(sorted(set(moving) ^ set(seen))),
            hint="start without `compile`",
        )
    deviation = float((found.move - expected.move).norm() / expected.move.norm())
    accepted = min(_ROUNDINGS * torch.finfo(dtype).eps, _MOST)
    if not deviation <= accepted:
        raise EngineError(
            "The compiled model does not apply the canary adapter as its own Python does",
            got=f"a difference of {deviation:.3g} of the adapter's effect",
            accepted=f"at most {accepted:.3g}",
            hint="start without `compile`",
        )
    return deviation


def _three_passes(runner: PreftCPUModelRunner, dtype: torch.dtype) -> _Passes:
    before = _forward(runner)
    runner.preft_state.num_calls = {}
    during = _under(runner, dtype)
    called = dict(runner.preft_state.num_calls)
    return _Passes(before, during, _forward(runner), called)


def _under(runner: PreftCPUModelRunner, dtype: torch.dtype, kind: str | None = None) -> torch.Tensor:
    """A pass under the canary's adapter, at every site or at those of one kind."""
    infos, state = runner.preft_manager.infos, runner.preft_state
    adapter = _canary_adapter(infos, dtype)
    if kind is not None:
        sites = [site if _kind(info) == kind else None for info, site in zip(infos, adapter.sites, strict=True)]
        adapter = replace(adapter, sites=tuple(sites))
    state.begin(StepRows((Run(0, _TOKENS // 2, (_CANARY,)),), (), (_CANARY,), _TOKENS // 2), {_CANARY: adapter})
    try:
        return _forward(runner)
    finally:
        state.begin(NO_ROWS, {})


def _kinds(runner: PreftCPUModelRunner) -> list[str]:
    infos = [info for info in runner.preft_manager.infos if not info.name.endswith("lm_head")]
    return list(dict.fromkeys(_kind(info) for info in infos))


def _kind(info: ModuleInfo) -> str:
    """Sites of one kind sit at the same place of every layer: `q_proj`, or `block` for a layer's output."""
    return "block" if info.kind is SiteKind.BLOCK else info.name.rpartition(".")[2]


def _forward(runner: PreftCPUModelRunner) -> torch.Tensor:
    # Different tokens: a padding token's embedding may be zero, which no update without a bias could move.
    tokens = torch.arange(_TOKENS) * max(1, runner.model_config.get_vocab_size() // _TOKENS)
    runner.input_ids.gpu[:_TOKENS] = tokens.to(runner.input_ids.gpu)
    with _attention_adds(runner):
        hidden: torch.Tensor = runner._dummy_run(_TOKENS, force_attention=True)[0]
    return hidden[:_TOKENS].detach().float().clone()


@contextmanager
def _attention_adds(runner: PreftCPUModelRunner) -> Iterator[None]:
    from vllm.model_executor.layers.attention import Attention

    layers = runner.compilation_config.static_forward_context.values()
    kernels = [layer.impl for layer in layers if isinstance(layer, Attention)]
    for kernel in kernels:
        kernel.forward = _added
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.forward


def _added(
    _layer: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: object, **settings: Any
) -> torch.Tensor:
    """In place of attention: `output` [T, H, D] becomes query [T, H, D] plus key and value [T, KV heads, D]."""
    output: torch.Tensor = settings["output"]
    output.copy_(query)
    for part in (key, value):
        output += part.repeat_interleave(query.shape[1] // part.shape[1], dim=1)
    return output


def _canary_adapter(infos: Sequence[ModuleInfo], dtype: torch.dtype) -> PackedAdapter:
    generator = torch.Generator().manual_seed(0)
    sites: list[PackedSite | None] = []
    for info in infos:
        if info.name.endswith("lm_head"):
            sites.append(None)
            continue
        d_in = info.in_features
        widths: Sequence[int] = info.out_features
        module: Any = info.module
        if module is not None:
            d_in = int(module.lora_a_stacked[0].shape[-1])
            widths = module.output_slices
        parts, column = [], 0
        for place, width in enumerate(widths):
            up_t = torch.randn(_RANK, width, generator=generator) * 0.02
            parts.append(UpPart(column, place * _RANK, up_t.to(dtype)))
            column += width
        down_t = (torch.randn(d_in, _RANK * len(parts), generator=generator) * 0.02).to(dtype)
        # What a module reads can be zero, and then only a bias moves it.
        bias = torch.ones(down_t.shape[1], dtype=dtype)
        sites.append(PackedSite.build(down_t, bias, parts))
    return PackedAdapter("canary", tuple(sites), 0)
