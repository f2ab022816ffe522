"""The fused update of block-output sites, run in Triton's interpreter against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from preft_kernels import dispatch
from preft_kernels.block_delta import block_delta_
from preft_kernels.reference import block_delta_reference
from preft_kernels.rows import Segment
from preft_kernels.segments import PlanBuffer, plan_rows
from preft_kernels.tuning import BlockDeltaConfig
from tests.kernels.cases import BF16, F32, SMALL, WIDE, Case, build, check

pytestmark = pytest.mark.interpreter

TINY = BlockDeltaConfig(rows=16, columns_in=32, columns_out=64)


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_small_batches(case: Case, rows: int) -> None:
    config = BlockDeltaConfig(rows, TINY.columns_in, TINY.columns_out)
    check(partial(block_delta_, config=config, num_programs=3), case)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_model_widths(case: Case) -> None:
    check(partial(block_delta_, num_programs=2), case)


@pytest.mark.parametrize("num_programs", [1, 2, 7, 64])
def test_any_grid_gives_the_same_bits(num_programs: int) -> None:
    results = []
    for programs in (5, num_programs):
        batch = build(SMALL[0])
        buffer = PlanBuffer(SMALL[0].num_rows, len(SMALL[0].ranks), "cpu")
        buffer.upload(batch.plan)
        block_delta_(batch.hidden, batch.residual, batch.tables, buffer, TINY, programs)
        results.append(batch.backing.view(torch.int32))
    assert torch.equal(*results)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = Case(64, (9, 4), F32, "whole", num_rows=40)
    found = []
    for segments in ([Segment(0, 40, 0)], [Segment(17, 1, 0)]):
        batch = build(case)
        buffer = PlanBuffer(case.num_rows, 2, "cpu")
        buffer.upload(plan_rows(segments))
        block_delta_(batch.hidden, batch.residual, batch.tables, buffer, TINY, 2)
        found.append(batch.hidden[17].clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("case", [*SMALL, *WIDE], ids=str)
def test_the_reference_passes_the_same_check(case: Case) -> None:
    check(lambda hidden, residual, tables, plan: block_delta_reference(hidden, residual, tables, plan.plan), case)


def test_what_is_not_served_is_refused() -> None:
    batch = build(Case(64, (4, 4), F32))
    with pytest.raises(ValueError, match="tables are 64 wide"):
        block_delta_(batch.hidden[:, :32], None, batch.tables, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strides"):
        block_delta_(batch.hidden.T.contiguous().T, None, batch.tables, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float16"):
        block_delta_(batch.hidden.half(), None, batch.tables, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual"):
        block_delta_(batch.hidden, batch.hidden[:3], batch.tables, None)  # type: ignore[arg-type]
    large = build(Case(64, (129, 4), F32))
    with pytest.raises(ValueError, match="ranks up to 128"):
        block_delta_(large.hidden, None, large.tables, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must divide"):
        BlockDeltaConfig(48, 32, 32)


def test_dispatch_says_what_runs_and_why() -> None:
    chosen = dispatch.choose(torch.zeros(2, 4))
    assert (chosen.name, "cpu" in chosen.reason) == ("reference", True)
    check(dispatch.block_delta_, SMALL[0])
    with dispatch.forced("triton"):
        assert dispatch.choose(torch.zeros(2, 4)).name == "triton"
        with dispatch.forced("reference"):
            assert dispatch.choose(torch.zeros(2, 4)).name == "reference"
        assert dispatch.choose(torch.zeros(2, 4)).name == "triton"
    with pytest.raises(ValueError, match="no implementation"), dispatch.forced("cuda"):
        pass


def test_the_check_can_fail() -> None:
    case = Case(64, (5, 9, 3), BF16)

    def run(hidden: torch.Tensor, residual: object, tables: object, plan: object, *, scale: float) -> None:
        before = hidden.clone()
        block_delta_reference(hidden, residual, tables, plan.plan)  # type: ignore[attr-defined,arg-type]
        hidden.copy_(torch.where(before.isnan(), before, before + scale * (hidden - before)))

    check(partial(run, scale=1.0), case)
    with pytest.raises(AssertionError, match="error"):
        check(partial(run, scale=1.1), case)
    with pytest.raises(AssertionError, match="outside"):
        check(lambda hidden, *_: hidden.fill_(0), case)
