"""The proof that adapters act on a GPU worker, at warm-up: every site is called, and only adapted rows move.

Three eager passes over the same tokens: without adapter, with a random adapter at every site on the first half of the
rows, and without again. If vLLM has loaded compiled code from before there were sites, their operations are not in it,
no site is called, and the worker does not become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from preft.errors import EngineError
from preft.serve.backend.canary import CanaryResult
from preft.serve.backend.packing import ModuleInfo
from preft.serve.backend.sites import PackedAdapter
from preft.serve.backend.step_rows import StepRows
from preft.serve.gpu.step import Step
from preft.types import SiteKind
from preft_kernels.packed import PackedSite, UpPart
from preft_kernels.rows import Run, Segment
from preft_kernels.segments import plan_rows

TOKENS, SLOT, RANK = 16, 0, 4
_ADAPTER = -1


def canary_adapter(infos: Sequence[ModuleInfo], max_rank: int, dtype: torch.dtype) -> PackedAdapter:
    """A small random adapter at every module of this rank; with a bias at blocks, so that zeros move too."""
    generator = torch.Generator().manual_seed(0)
    rank = min(RANK, max_rank)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(dtype)

    sites: list[PackedSite | None] = []
    for info in infos:
        module: Any = info.module
        d_in = info.in_features if module is None else int(module.lora_a_stacked[0].shape[-1])
        widths: Sequence[int] = info.out_features if module is None else module.output_slices
        parts = [UpPart(sum(widths[:place]), place * rank, draw(rank, width)) for place, width in enumerate(widths)]
        bias = torch.ones(rank, dtype=dtype) if info.kind is SiteKind.BLOCK else None
        sites.append(PackedSite.build(draw(d_in, rank * len(parts)), bias, parts))
    return PackedAdapter("canary", tuple(sites), 0)


def canary_step() -> Step:
    """The first half of the rows under the canary's adapter."""
    half = TOKENS // 2
    rows = StepRows((Run(0, half, (_ADAPTER,)),), (), (_ADAPTER,), half)
    return Step(rows, plan_rows([Segment(0, half, SLOT)]), TOKENS)


def run_gpu_canary(runner: Any, max_rank: int, dtype: torch.dtype, forward: Callable[[], torch.Tensor]) -> CanaryResult:
    """Runs the canary; no slot holds an adapter afterwards.

    Args:
        runner: Of this worker, before its first request.
        max_rank: Of the tables.
        dtype: Of the numbers.
        forward: Runs an eager dummy pass over `TOKENS` tokens and returns its hidden states [TOKENS, D].

    Raises:
        EngineError: A site was not called, nothing moved, rows without adapter moved, or base did not come back.
    """
    manager = runner.preft_manager
    before = forward().float().clone()
    manager.fill_slot(canary_adapter(manager.infos, max_rank, dtype), SLOT)
    manager.blocks.num_calls, linear_before = {}, manager.punica.calls.num_calls
    runner.preft_forced = canary_step()
    try:
        during = forward().float().clone()
    finally:
        runner.preft_forced = None
    after = forward().float()
    blocks = [info.name for info in manager.infos if info.kind is SiteKind.BLOCK]
    silent = [name for name in blocks if not manager.blocks.num_calls.get(name)]
    num_linear = len(manager.infos) - len(blocks)
    linear_calls = manager.punica.calls.num_calls - linear_before
    moved = float((during - before).abs().max())
    restored = torch.equal(before, after)
    if silent or linear_calls < num_linear or not moved > 0 or not restored:
        raise EngineError(
            "The canary adapter did not act as it must, so no adapter can be trusted on this engine",
            got=f"{len(silent)} silent blocks {silent[:3]}, {linear_calls} of {num_linear} linear sites called, "
            f"moved {moved:.3g}, base restored: {restored}",
            accepted="every site called, outputs moved, base restored exactly",
            hint="if code compiled by another set-up may have been loaded, clear vLLM's compile cache",
        )
    return CanaryResult(len(blocks) + num_linear, moved, restored)
