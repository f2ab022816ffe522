"""The proof that adapters act on this worker: a synthetic adapter must move the model, and only where it should.

Three forward passes over the same tokens: without adapter, with a random adapter at every site on the first half of
the rows, and without again. Every site must have been called, the outputs must differ, and the third pass must equal
the first exactly. An engine that fails this is not ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from preft.errors import EngineError
from preft.serve.backend.packing import ModuleInfo
from preft.serve.backend.runner import PreftCPUModelRunner
from preft.serve.backend.sites import PackedAdapter
from preft.serve.backend.step_rows import NO_ROWS, StepRows
from preft_kernels.packed import PackedSite, UpPart
from preft_kernels.rows import Run

_TOKENS = 16
_CANARY = -1
_RANK = 4


@dataclass(frozen=True)
class CanaryResult:
    """What the canary found on one worker.

    Attributes:
        num_sites: Sites that were called.
        moved: Largest absolute change of the last hidden state.
        restored: Whether the pass after it equals the pass before it exactly.
    """

    num_sites: int
    moved: float
    restored: bool


def run_canary(runner: PreftCPUModelRunner, dtype: torch.dtype) -> CanaryResult:
    """Runs the canary.

    Args:
        runner: Of this worker; its step state is left without adapters.
        dtype: Of the canary's numbers.

    Raises:
        EngineError: A site was not called, nothing moved, or base did not come back.
    """
    infos, state = runner.preft_manager.infos, runner.preft_state
    inner = [info for info in infos if not info.name.endswith("lm_head")]
    before = _forward(runner)
    state.num_calls = {}
    state.rows = StepRows((Run(0, _TOKENS // 2, (_CANARY,)),), (), (_CANARY,), _TOKENS // 2)
    state.active = {_CANARY: _canary_adapter(infos, dtype)}
    try:
        during = _forward(runner)
    finally:
        state.rows, state.active = NO_ROWS, {}
    called = dict(state.num_calls)
    after = _forward(runner)
    silent = [info.name for info in inner if not called.get(info.index)]
    moved = float((during - before).abs().max())
    restored = torch.equal(before, after)
    if silent or not moved > 0 or not restored:
        raise EngineError(
            "The canary adapter did not act as it must, so no adapter can be trusted on this engine",
            got=f"{len(silent)} silent sites {silent[:3]}, moved {moved:.3g}, base restored: {restored}",
            accepted="every site called, outputs moved, base restored exactly",
        )
    return CanaryResult(len(called), moved, restored)


def _forward(runner: PreftCPUModelRunner) -> torch.Tensor:
    # Different tokens: a padding token's embedding may be zero, which no update without a bias could move.
    tokens = torch.arange(_TOKENS) * max(1, runner.model_config.get_vocab_size() // _TOKENS)
    runner.input_ids.gpu[:_TOKENS] = tokens.to(runner.input_ids.gpu)
    hidden: torch.Tensor = runner._dummy_run(_TOKENS, force_attention=True)[0]
    return hidden[:_TOKENS].detach().float().clone()


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
        # A warm-up pass attends to an empty cache: what `o_proj` reads can be zero, and then only a bias moves it.
        bias = torch.ones(down_t.shape[1], dtype=dtype)
        sites.append(PackedSite.build(down_t, bias, parts))
    return PackedAdapter("canary", tuple(sites), 0)
