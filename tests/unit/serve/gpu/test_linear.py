"""vLLM's tables are built from the plan as vLLM builds them, and its kernels are launched over a grid that fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

from preft.errors import EngineError
from preft.serve.gpu import linear_op
from preft.serve.gpu.kernel_meta import KernelMeta
from preft.serve.gpu.linear_op import Grid, LinearCalls, tight_expand, tight_shrink
from preft.serve.gpu.manager import fill_block, fill_linear
from preft_kernels.packed import PackedSite, UpPart
from preft_kernels.rows import Segment
from preft_kernels.segments import EMPTY_PLAN, RowPlan, plan_rows
from preft_kernels.tables import BlockTables

SLOTS, MAX_TOKENS = 5, 64


def plan_of(slots: list[int]) -> RowPlan:
    return plan_rows(Segment(row, 1, slot) for row, slot in enumerate(slots) if slot >= 0)


@given(st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=MAX_TOKENS), st.lists(st.integers(0, 4), max_size=9))
def test_the_tables_are_those_that_vllm_builds(slots: list[int], earlier: list[int]) -> None:
    ours = KernelMeta(MAX_TOKENS, SLOTS, "cpu", LoRAKernelMeta)
    if earlier:
        ours.upload(plan_of(earlier), len(earlier), launch=True)
    plan = plan_of(slots)
    ours.upload(plan, len(slots), launch=bool(plan.num_rows))
    theirs = LoRAKernelMeta.make(SLOTS, MAX_TOKENS, "cpu")
    theirs.prepare_tensors(torch.tensor(slots))
    assert bool(ours.meta.no_lora_flag_cpu) == bool(theirs.no_lora_flag_cpu) == (max(slots) < 0)
    assert int(ours.meta.num_active_loras_cpu) == int(theirs.num_active_loras_cpu)
    assert int(ours.meta.default_num_active_loras_cpu) == int(theirs.default_num_active_loras_cpu)
    if max(slots) < 0:
        return
    for mine, other in zip(ours.meta.meta_args(len(slots), False), theirs.meta_args(len(slots), False), strict=True):
        assert mine.tolist() == other.tolist()
    assert ours.meta.token_lora_mapping[len(slots) :].eq(-1).all(), "rows of padding must be nobody's"


def test_the_tables_keep_their_place_and_cost_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = KernelMeta(MAX_TOKENS, SLOTS, "cpu", LoRAKernelMeta)
    places = [tensor.data_ptr() for tensor in ours.meta.meta_args(MAX_TOKENS, False)[:5]]
    assert all(place % 64 == places[0] % 64 for place in places)
    plain, copies = torch.Tensor.copy_, []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *a, **k: copies.append(k) or plain(self, *a, **k))
    ours.upload(plan_of([0, -1, 3]), 3, launch=True)
    ours.upload(EMPTY_PLAN, 3, launch=False)
    assert copies == [{"non_blocking": True}], "a step without adapters copies nothing"
    assert places == [tensor.data_ptr() for tensor in ours.meta.meta_args(MAX_TOKENS, False)[:5]]


def test_capture_without_rows_launches_over_nothing() -> None:
    ours = KernelMeta(MAX_TOKENS, SLOTS, "cpu", LoRAKernelMeta)
    ours.upload(EMPTY_PLAN, 8, launch=True)
    assert not bool(ours.meta.no_lora_flag_cpu)
    assert ours.meta.active_lora_ids.eq(-1).all()


class Launched:
    """Stands in for vLLM's two functions and keeps what they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def meta_of(slots: list[int]) -> tuple[torch.Tensor, ...]:
    ours = KernelMeta(MAX_TOKENS, SLOTS, "cpu", LoRAKernelMeta)
    ours.upload(plan_of(slots), len(slots), launch=True)
    return ours.meta.meta_args(len(slots), False)


def test_the_grid_is_the_longest_group_by_the_groups() -> None:
    slots = [0, 0, 0, -1, 2, -1, -1, -1]
    x, buffer, y = torch.randn(8, 16), torch.zeros(2, 8, 4), torch.zeros(8, 6)
    launched, grid = Launched(), Grid(3, 3)
    tight_shrink(launched, x, [x], buffer, meta_of(slots), 0.5, grid)
    seen, _, filled, token_slots, sorted_rows, *_, groups, scale = launched.calls[0]
    assert (seen.shape, seen.data_ptr(), filled.shape) == ((3, 16), x.data_ptr(), buffer.shape)
    assert (len(token_slots), len(sorted_rows), int(groups), scale) == (3, 3, 3, 0.5)
    tight_expand(launched, buffer, [x], y, meta_of(slots), 0, True, grid)
    seen, _, out, token_slots, sorted_rows, *_, groups, offset, add = launched.calls[1]
    assert (seen.shape, seen.data_ptr(), seen.stride()) == ((2, 3, 4), buffer.data_ptr(), buffer.stride())
    assert (out.shape, len(token_slots), int(groups), offset, add) == ((8, 6), 3, 3, 0, True)


def test_input_that_is_not_contiguous_is_made_so_before_it_is_cut() -> None:
    launched, x = Launched(), torch.randn(8, 32)[:, :16]
    tight_shrink(launched, x, [x], torch.zeros(1, 8, 4), meta_of([0, 0, 0, -1, 2, -1, -1, -1]), 1.0, Grid(3, 3))
    seen = launched.calls[0][0]
    assert seen.is_contiguous()
    assert torch.equal(seen.as_strided((8, 16), (16, 1)), x), "rows past the cut must lie behind it in memory"


def test_without_a_grid_it_is_vllms() -> None:
    launched, x, meta = Launched(), torch.randn(8, 16), meta_of([0] * 8)
    tight_shrink(launched, x, [x], torch.zeros(1, 8, 4), meta, 1.0, None)
    assert launched.calls[0][0] is x
    assert int(launched.calls[0][-2]) == SLOTS + 1
    tight_shrink(launched, x, [x], torch.zeros(1, 8, 4), meta, 1.0, Grid(8, 1))
    assert launched.calls[1][0] is x
    assert int(launched.calls[1][-2]) == 1


def test_the_operations_look_up_the_step_and_launch_nothing_without_adapters() -> None:
    shrink, expand, meta = Launched(), Launched(), meta_of([0] * 4)
    calls = LinearCalls(shrink, expand, lambda count: meta)
    linear_op.bind("test", calls)
    x, buffer, y = torch.randn(4, 16), torch.zeros(1, 4, 4), torch.zeros(4, 6)

    def both() -> None:
        torch.ops.preft_gpu_linear.shrink(buffer, x, [x], 1.0, "test")
        torch.ops.preft_gpu_linear.expand(y, buffer, [x], 0, True, "test")

    both()
    assert (shrink.calls, expand.calls) == ([], [])
    calls.launch, calls.grid = True, Grid(4, 1)
    both()
    assert (len(shrink.calls), len(expand.calls), calls.num_calls) == (1, 1, 1)


def linear_module() -> Any:
    """What vLLM's merged column-parallel layer holds, with other numbers left in every slot."""
    module = SimpleNamespace(
        output_slices=(6, 4),
        lora_a_stacked=tuple(torch.full((SLOTS, 1, 8, 16), 7.0) for _ in range(2)),
        lora_b_stacked=tuple(torch.full((SLOTS, 1, width, 8), 7.0) for width in (6, 4)),
    )

    def reset_lora(index: int) -> None:
        for table in (*module.lora_a_stacked, *module.lora_b_stacked):
            table[index] = 0

    module.reset_lora = reset_lora
    return module


def test_a_slot_of_vllms_stacks_computes_what_the_packed_site_does() -> None:
    module = linear_module()
    down_t = torch.randn(16, 5)
    site = PackedSite.build(down_t, None, [UpPart(0, 0, torch.randn(2, 6)), UpPart(6, 2, torch.randn(3, 4))])
    fill_linear(module, 3, site)
    x = torch.randn(9, 16)
    wanted = torch.cat([x @ down_t[:, :2] @ site.parts[0].up_t, x @ down_t[:, 2:] @ site.parts[1].up_t], 1)
    tables = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
    found = torch.cat([x @ down[3, 0].T @ up[3, 0].T for down, up in tables], 1)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert module.lora_a_stacked[0][2].eq(7).all(), "another slot was touched"
    fill_linear(module, 3, PackedSite.build(down_t[:, 2:], None, [UpPart(6, 0, torch.randn(3, 4))]))
    assert module.lora_b_stacked[0][3].eq(0).all(), "the part that the new adapter lacks is left over"
    fill_linear(module, 3, None)
    assert all(table[3].eq(0).all() for table in (*module.lora_a_stacked, *module.lora_b_stacked))


def test_linear_sites_that_vllms_kernels_cannot_serve_are_refused() -> None:
    module, part = linear_module(), UpPart(0, 0, torch.randn(2, 6))
    with pytest.raises(EngineError, match="bias"):
        fill_linear(module, 0, PackedSite.build(torch.randn(16, 2), torch.zeros(2), [part]))
    for wrong in (UpPart(1, 0, torch.randn(2, 4)), UpPart(0, 0, torch.randn(2, 4))):
        with pytest.raises(EngineError, match="not a slice"):
            fill_linear(module, 0, PackedSite.build(torch.randn(16, 2), None, [wrong]))


def test_a_slot_of_block_tables() -> None:
    tables = BlockTables.allocate(SLOTS, 4, 16, torch.float32, "cpu")
    site = PackedSite.build(torch.randn(16, 3), torch.randn(3), [UpPart(0, 0, torch.randn(3, 16))])
    fill_block(tables, 2, site)
    assert tables.ranks.tolist() == [0, 0, 3, 0, 0]
    assert torch.equal(tables.down[2, :3], site.down_t.T)
    assert torch.equal(tables.up[2, :3], site.parts[0].up_t)
    assert torch.equal(tables.bias[2, :3], site.bias)  # type: ignore[arg-type]
    fill_block(tables, 2, None)
    assert tables.ranks.tolist() == [0] * SLOTS


def test_grid_of_a_numpy_plan_is_plain_numbers() -> None:
    plan = plan_of([0, 0, -1])
    assert (plan.longest, plan.num_slots) == (2, 1)
    assert not isinstance(plan.longest, np.integer)
