"""Stacked weights that are kept between steps: the same numbers, built again only when the adapters change."""

from __future__ import annotations

import gc

import pytest
import torch

from preft_kernels.grouped import plan_updates, run_updates
from preft_kernels.packed import PackedSite, UpPart
from preft_kernels.rows import Run
from preft_kernels.stacks import StackCache

WIDTH, RANK, COUNT = 12, 2, 5
PLENTY = 1 << 20


def site(seed: int, *, bias: bool = False) -> PackedSite:
    draw = torch.Generator().manual_seed(seed)
    parts = [
        UpPart(0, 0, torch.randn(RANK, 4, generator=draw)),
        UpPart(4, RANK, torch.randn(RANK, 8, generator=draw)),
    ]
    down = torch.randn(WIDTH, 2 * RANK, generator=draw)
    return PackedSite.build(down, torch.randn(2 * RANK, generator=draw) if bias else None, parts)


def expected(y: torch.Tensor, x: torch.Tensor, sites: list[PackedSite], length: int) -> torch.Tensor:
    """By definition, row by row in float64."""
    result = y.double()
    for row in range(len(x)):
        member = sites[row // length]
        hidden = x[row].double() @ member.down_t.double()
        if member.bias is not None:
            hidden = hidden + member.bias.double()
        for part in member.parts:
            columns = slice(part.column, part.column_stop)
            result[row, columns] += hidden[part.rank_start : part.rank_stop] @ part.up_t.double()
    return result


@pytest.mark.parametrize("bias", [False, True])
def test_kept_stacks_give_the_numbers_of_the_definition(bias: bool) -> None:
    sites = [site(seed, bias=bias) for seed in range(COUNT)]
    stacks = StackCache(PLENTY)
    for step in range(3):
        draw = torch.Generator().manual_seed(100 + step)
        x, y = (torch.randn(COUNT, WIDTH, generator=draw) for _ in range(2))
        right = expected(y, x, sites, 1)
        run_updates(plan_updates([Run(0, 1, tuple(range(COUNT)))], [sites], stacks=stacks), y, x)
        torch.testing.assert_close(y.double(), right, atol=1e-5, rtol=1e-5)  # float32 against float64
    assert stacks.num_built == 1


def decode(stacks: StackCache, sites: list[PackedSite], *, module: int = 0, length: int = 1) -> None:
    x, y = torch.randn(len(sites) * length, WIDTH), torch.zeros(len(sites) * length, WIDTH)
    right = expected(y, x, sites, length)
    runs = [Run(0, length, tuple(range(len(sites))))]
    run_updates(plan_updates(runs, [sites], stacks=stacks, module=module), y, x)
    torch.testing.assert_close(y.double(), right, atol=1e-5, rtol=1e-5)


def test_another_order_another_adapter_and_another_module_have_their_own() -> None:
    sites, stacks = [site(seed) for seed in range(COUNT)], StackCache(PLENTY)
    decode(stacks, sites)
    decode(stacks, sites)
    assert stacks.num_built == 1
    decode(stacks, sites[::-1])
    assert stacks.num_built == 2
    decode(stacks, sites[:-1])
    assert stacks.num_built == 3
    decode(stacks, [*sites[:-2], site(7)])  # as many, one of them replaced
    assert stacks.num_built == 4
    decode(stacks, [*sites[:-2], site(8)], module=1)
    assert stacks.num_built == 5
    one = 4 * (WIDTH * 2 * RANK + RANK * WIDTH) * 4
    assert stacks.held_bytes == 2 * one  # the last one of each module


def test_prompts_and_single_adapters_keep_nothing() -> None:
    sites, stacks = [site(seed) for seed in range(COUNT)], StackCache(PLENTY)
    decode(stacks, sites, length=3)
    decode(stacks, sites[:1])
    assert (stacks.num_built, stacks.held_bytes) == (0, 0)


@pytest.mark.parametrize(
    "pattern", [(0, 0, 0, 0), (0, 1, 2, 0, 1, 2), (0, 1, 0, 2, 0, 3), (3, 3, None, 1), (None, None)]
)
@pytest.mark.parametrize("same", [False, True])
def test_rows_that_share_adapters(pattern: tuple[int | None, ...], same: bool) -> None:
    """Interleaved, unevenly many, some without a site, all under one; and `x` may be `y` itself."""
    made = [site(seed) for seed in range(4)]
    sites = [None if index is None else made[index] for index in pattern]
    count, stacks = len(sites), StackCache(PLENTY)
    for _ in range(2):
        y = torch.randn(count + 2, WIDTH)
        x = y if same else torch.randn(count + 2, WIDTH)
        right = y.double()
        for row, member in enumerate(sites, start=1):
            if member is not None:
                right[row] = expected(y[row : row + 1], x[row : row + 1], [member], 1)[0]
        run_updates(plan_updates([Run(1, 1, tuple(range(count)))], [sites], stacks=stacks), y, x)
        torch.testing.assert_close(y.double(), right, atol=1e-5, rtol=1e-5)
    distinct = {index for index in pattern if index is not None}
    # Each adapter's numbers are stacked at most once, however many rows it has.
    assert stacks.held_bytes <= len(distinct) * made[0].num_bytes


def test_adapters_of_different_shapes_share_rows() -> None:
    narrow = PackedSite.build(torch.randn(WIDTH, 1), None, [UpPart(0, 0, torch.randn(1, WIDTH))])
    sites = [site(1), narrow, site(1), narrow, site(2), narrow]
    decode(StackCache(PLENTY), sites)
    decode(StackCache(PLENTY), [sites[0], narrow, sites[0], narrow])


def test_the_limit_is_kept_and_numbers_stay_right_beyond_it() -> None:
    sites, stacks = [site(seed) for seed in range(COUNT)], StackCache(10)
    decode(stacks, sites)
    decode(stacks, sites)
    assert (stacks.num_built, stacks.held_bytes) == (0, 0)


def test_it_keeps_no_adapter_alive_and_never_takes_one_for_another() -> None:
    stacks = StackCache(PLENTY)
    for seed in range(20):  # freed at once: the next ones may lie at the same addresses
        decode(stacks, [site(2 * seed), site(2 * seed + 1)])
        gc.collect()
    assert stacks.num_built == 20
