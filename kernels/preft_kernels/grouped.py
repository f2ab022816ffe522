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

MAX_BATCHED_ROWS = 512
"""Segments longer than this go one by one: the product is large enough that stacking weights would only copy them."""


def grouped_update(
    y: torch.Tensor, x: torch.Tensor, runs: Sequence[Run], sites: Sequence[Sequence[PackedSite | None]]
) -> int:
    """Adds each adapter's update to its own rows.

    Semantics: for each segment s of each run, with site = sites[run][s]:
        y[rows, part.column:part.column_stop] += (x[rows] @ down_t + bias)[:, part ranks] @ up_t

    Args:
        y: [T, d_out], any row stride; mutated in place.
        x: [T, d_in]; may be `y` itself.
        runs: Rows of each adapter.
        sites: For each run, the numbers of each of its segments, or None where the adapter has nothing here.

    Returns:
        Number of matrix products that ran.
    """
    products = 0
    for run, run_sites in zip(runs, sites, strict=True):
        at = run.start
        for _, group in groupby(run_sites, key=_signature):
            members = list(group)
            stop = at + run.length * len(members)
            if members[0] is not None:
                for low, chunk in _chunks(members, at, run.length):
                    high = low + run.length * len(chunk)
                    products += _update(y[low:high], x[low:high], run.length, chunk)
            at = stop
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


def _update(y: torch.Tensor, x: torch.Tensor, length: int, sites: list[PackedSite]) -> int:
    first = sites[0]
    if len(sites) == 1:
        hidden = x @ first.down_t  # [L, R]
        if first.bias is not None:
            hidden += first.bias
        hidden = hidden.to(y.dtype)
        for part in first.parts:
            y[:, part.column : part.column_stop].addmm_(hidden[:, part.rank_start : part.rank_stop], part.up_t)
        return 1 + len(first.parts)
    count = len(sites)
    hidden = torch.bmm(x.reshape(count, length, -1), torch.stack([site.down_t for site in sites]))  # [S, L, R]
    if first.bias is not None:
        hidden += torch.stack([site.bias for site in sites if site.bias is not None]).unsqueeze(1)
    hidden = hidden.to(y.dtype)
    rows = y.unflatten(0, (count, length))
    for index, part in enumerate(first.parts):
        ups = torch.stack([site.parts[index].up_t for site in sites])  # [S, r, w]
        rows[:, :, part.column : part.column_stop].baddbmm_(hidden[:, :, part.rank_start : part.rank_stop], ups)
    return 1 + len(first.parts)
