"""Grouped low-rank updates on CPU: adjacent equal segments in one batched product, each adapter at its own rank.

Padding every adapter to the largest rank, or looping over single rows, is what makes multi-adapter serving slow on
CPUs. Here an adapter's cost is that of its own two products, and equal neighbours share the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from preft_kernels.packed import PackedSite
from preft_kernels.rows import Run
from preft_kernels.stacks import Stack, StackCache

MAX_BATCHED_ROWS = 512
"""Segments longer than this go one by one: the product is large enough that stacking weights would only copy them."""


def grouped_update(
    y: torch.Tensor,
    x: torch.Tensor,
    runs: Sequence[Run],
    sites: Sequence[Sequence[PackedSite | None]],
    *,
    stacks: StackCache | None = None,
    module: int = 0,
) -> int:
    """Adds each adapter's update to its own rows.

    Semantics: for each segment s of each run, with site = sites[run][s]:
        y[rows, part.column:part.column_stop] += (x[rows] @ down_t + bias)[:, part ranks] @ up_t

    Args:
        y: [T, d_out], any row stride; mutated in place.
        x: [T, d_in]; may be `y` itself.
        runs: Rows of each adapter.
        sites: For each run, the numbers of each of its segments, or None where the adapter has nothing here.
        stacks: Where the stacked weights of single rows are kept for the next step, if anywhere.
        module: The module's key there.

    Returns:
        Number of matrix products that ran.
    """
    products = 0
    for run, run_sites in zip(runs, sites, strict=True):
        if run.length == 1 and len({id(site) for site in run_sites}) < len(run_sites):
            products += _update_shared(y, x, run.start, run_sites, stacks, module)
            continue
        at = run.start
        for _, group in groupby(run_sites, key=_signature):
            members = list(group)
            stop = at + run.length * len(members)
            if members[0] is not None:
                for low, chunk in _chunks(members, at, run.length):
                    high = low + run.length * len(chunk)
                    kept = (
                        stacks.get((module, low), chunk)
                        if stacks is not None and run.length == 1 < len(chunk)
                        else None
                    )
                    products += _update(y[low:high], x[low:high], run.length, chunk, kept)
            at = stop
    return products


def _update_shared(
    y: torch.Tensor,
    x: torch.Tensor,
    start: int,
    sites: Sequence[PackedSite | None],
    stacks: StackCache | None,
    module: int,
) -> int:
    """Single rows that share adapters: sorted so that each adapter's rows are one segment and its numbers read once."""
    rows: dict[int, list[int]] = {}
    members: dict[int, PackedSite] = {}
    for row, site in enumerate(sites, start):
        if site is not None:
            rows.setdefault(id(site), []).append(row)
            members[id(site)] = site
    order = sorted(rows, key=lambda key: (len(rows[key]), members[key].signature))
    if not order:
        return 0
    picked = torch.tensor([row for key in order for row in rows[key]], device=y.device)
    inputs, outputs = x.index_select(0, picked), y.index_select(0, picked)
    products = at = 0
    for (length, _), group in groupby(order, key=lambda key: (len(rows[key]), members[key].signature)):
        chunk = [members[key] for key in group]
        stop = at + length * len(chunk)
        kept = stacks.get((module, start + at), chunk) if stacks is not None and len(chunk) > 1 else None
        products += _update(outputs[at:stop], inputs[at:stop], length, chunk, kept)
        at = stop
    y.index_copy_(0, picked, outputs)
    return products


def _signature(site: PackedSite | None) -> tuple[int, ...]:
    return () if site is None else site.signature


def _chunks(members: list[PackedSite | None], start: int, length: int) -> Iterator[tuple[int, list[PackedSite]]]:
    present = [member for member in members if member is not None]
    if length <= MAX_BATCHED_ROWS and len(present) > 1:
        yield start, present
        return
    for index, member in enumerate(present):
        yield start + index * length, [member]


def _update(y: torch.Tensor, x: torch.Tensor, length: int, sites: list[PackedSite], kept: Stack | None = None) -> int:
    first = sites[0]
    if len(sites) == 1:
        hidden = x @ first.down_t  # [L, R]
        if first.bias is not None:
            hidden += first.bias
        hidden = hidden.to(y.dtype)
        for part in first.parts:
            y[:, part.column : part.column_stop].addmm_(hidden[:, part.rank_start : part.rank_stop], part.up_t)
        return 1 + len(first.parts)
    count, stack = len(sites), kept or Stack.build(sites)
    hidden = torch.bmm(x.reshape(count, length, -1), stack.down_t)  # [S, L, R]
    if stack.bias is not None:
        hidden += stack.bias
    hidden = hidden.to(y.dtype)
    rows = y.unflatten(0, (count, length))
    for part, ups in zip(first.parts, stack.ups, strict=True):
        rows[:, :, part.column : part.column_stop].baddbmm_(hidden[:, :, part.rank_start : part.rank_stop], ups)
    return 1 + len(first.parts)
