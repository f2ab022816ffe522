"""Grouped low-rank updates on CPU: adjacent equal segments in one batched product, each adapter at its own rank.

Padding every adapter to the largest rank, or looping over single rows, is what makes multi-adapter serving slow on
CPUs. Here an adapter's cost is that of its own two products, and equal neighbours share the call. Which products there
are is worked out apart from running them: steps that decode the same requests have the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from preft_kernels.packed import PackedSite
from preft_kernels.rows import Run
from preft_kernels.stacks import Stack, StackCache

MAX_BATCHED_ROWS = 512
"""Segments longer than this go one by one: the product is large enough that stacking weights would only copy them."""


@dataclass(frozen=True)
class Product:
    """Adjacent segments of one length whose updates are one batched product.

    Attributes:
        start: First row.
        length: Rows of each segment.
        sites: Of each segment; all of one signature.
        stack: Their joined numbers, where those are kept.
    """

    start: int
    length: int
    sites: tuple[PackedSite, ...]
    stack: Stack | None = None

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.length * len(self.sites)


@dataclass(frozen=True)
class Gathered:
    """Single rows that share adapters: each adapter's rows are brought together, so that its numbers are read once.

    Attributes:
        rows: [N], the rows in the order of the products.
        products: Over those N rows.
    """

    rows: torch.Tensor
    products: tuple[Product, ...]


UpdatePlan = tuple[Product | Gathered, ...]
"""The products of one module in one step."""


def plan_updates(
    runs: Sequence[Run],
    sites: Sequence[Sequence[PackedSite | None]],
    *,
    stacks: StackCache | None = None,
    module: int = 0,
) -> UpdatePlan:
    """Works out the products of one module in one step.

    A plan holds the sites, and stacks that are kept: drop it when the step's rows or adapters change.

    Args:
        runs: Rows of each adapter.
        sites: For each run, the numbers of each of its segments, or None where the adapter has nothing here.
        stacks: Where the stacked weights of single rows are kept for the next step, if anywhere.
        module: The module's key there.
    """
    plan: list[Product | Gathered] = []
    for run, run_sites in zip(runs, sites, strict=True):
        if run.length == 1 and len({id(site) for site in run_sites}) < len(run_sites):
            plan += _shared_rows(run.start, run_sites, stacks, module)
            continue
        at = run.start
        for _, group in groupby(run_sites, key=_signature):
            members = list(group)
            stop = at + run.length * len(members)
            if members[0] is not None:
                plan += _products(members, at, run.length, stacks, module)
            at = stop
    return tuple(plan)


def run_updates(plan: UpdatePlan, y: torch.Tensor, x: torch.Tensor) -> int:
    """Adds each adapter's update to its own rows.

    Semantics: for each segment s of each run that was planned, with site = sites[run][s]:
        y[rows, part.column:part.column_stop] += (x[rows] @ down_t + bias)[:, part ranks] @ up_t

    Args:
        plan: From `plan_updates`.
        y: [T, d_out], any row stride; mutated in place.
        x: [T, d_in]; may be `y` itself.

    Returns:
        Number of matrix products that ran.
    """
    count = 0
    for part in plan:
        if isinstance(part, Product):
            count += _run(part, y, x)
            continue
        inputs, outputs = x.index_select(0, part.rows), y.index_select(0, part.rows)
        count += sum(_run(product, outputs, inputs) for product in part.products)
        y.index_copy_(0, part.rows, outputs)
    return count


def _shared_rows(
    start: int, sites: Sequence[PackedSite | None], stacks: StackCache | None, module: int
) -> list[Product | Gathered]:
    rows: dict[int, list[int]] = {}
    members: dict[int, PackedSite] = {}
    for row, site in enumerate(sites, start):
        if site is not None:
            rows.setdefault(id(site), []).append(row)
            members[id(site)] = site
    if len(members) == 1 and len(next(iter(rows.values()))) == len(sites):
        return [Product(start, len(sites), tuple(members.values()))]
    order = sorted(rows, key=lambda key: (len(rows[key]), members[key].signature))
    if not order:
        return []
    products, at = [], 0
    for (length, _), group in groupby(order, key=lambda key: (len(rows[key]), members[key].signature)):
        chunk = tuple(members[key] for key in group)
        kept = stacks.get((module, start + at), chunk) if stacks is not None and len(chunk) > 1 else None
        products.append(Product(at, length, chunk, kept))
        at = products[-1].stop
    return [Gathered(torch.tensor([row for key in order for row in rows[key]]), tuple(products))]


def _signature(site: PackedSite | None) -> tuple[int, ...]:
    return () if site is None else site.signature


def _products(
    members: Sequence[PackedSite | None], start: int, length: int, stacks: StackCache | None, module: int
) -> Iterator[Product]:
    present = tuple(member for member in members if member is not None)
    if length > MAX_BATCHED_ROWS or len(present) == 1:
        for index, member in enumerate(present):
            yield Product(start + index * length, length, (member,))
        return
    kept = stacks.get((module, start), present) if stacks is not None and length == 1 else None
    yield Product(start, length, present, kept)


def _run(product: Product, y: torch.Tensor, x: torch.Tensor) -> int:
    sites, length = product.sites, product.length
    first, count = sites[0], len(sites)
    y, x = y[product.start : product.stop], x[product.start : product.stop]
    if count == 1:
        hidden = x @ first.down_t  # [L, R]
        if first.bias is not None:
            hidden += first.bias
        hidden = hidden.to(y.dtype)
        for part in first.parts:
            y[:, part.column : part.column_stop].addmm_(hidden[:, part.rank_start : part.rank_stop], part.up_t)
        return 1 + len(first.parts)
    stack = product.stack or Stack.build(sites)
    hidden = torch.bmm(x.reshape(count, length, -1), stack.down_t)  # [S, L, R]
    if stack.bias is not None:
        hidden += stack.bias
    hidden = hidden.to(y.dtype)
    rows = y.unflatten(0, (count, length))
    for part, ups in zip(first.parts, stack.ups, strict=True):
        rows[:, :, part.column : part.column_stop].baddbmm_(hidden[:, :, part.rank_start : part.rank_stop], ups)
    return 1 + len(first.parts)
