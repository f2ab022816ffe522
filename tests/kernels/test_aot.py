"""Compiled for GPUs that are not here: nothing spills, memory fits, accesses are wide, products use matrix units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from preft_kernels.tuning import BlockDeltaConfig, block_delta_config, candidates

if TYPE_CHECKING:
    from tests.kernels.aot import Code

pytestmark = pytest.mark.aot

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHAPES = [(576, 4), (896, 16), (4096, 16), (4096, 64), (8192, 128)]
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_block_delta(
    width: int, rank: int, target: str, config: BlockDeltaConfig, dtype: torch.dtype = torch.bfloat16
) -> Code:
    from preft_kernels.block_delta import block_delta_kernel, constants
    from tests.kernels.aot import compile_for

    numbers = ("hidden_ptr", "residual_ptr", "down_ptr", "bias_ptr", "up_ptr")
    integers = ("ranks_ptr", "header_ptr", "tiles_ptr", "rows_ptr")
    types = {
        **dict.fromkeys(numbers, f"*{TYPES[dtype]}"),
        **dict.fromkeys(integers, "*i32"),
        "hidden_stride": "i32",
        "residual_stride": "i32",
    }
    shape = constants(rank, width, config, has_residual=True, dtype=dtype)
    return compile_for(
        block_delta_kernel, types, shape, target, aligned=list(types), warps=config.warps, stages=config.stages
    )


def problems(code: Code) -> list[str]:
    """What is wrong with compiled code; empty if nothing is."""
    from tests.kernels.aot import SHARED_LIMIT

    found = []
    if code.stack or code.spills:
        found.append(f"stack {code.stack}, spills {code.spills}")
    if code.shared > SHARED_LIMIT[code.target]:
        found.append(f"shared {code.shared}, limit {SHARED_LIMIT[code.target]}")
    if not code.matrix:
        found.append("no matrix instructions")
    if not code.has_wide("load") or not code.has_wide("store") or code.has_narrow_store():
        found.append(f"accesses {dict(code.accesses)}")
    if any(name.startswith(("RED", "ATOM")) or "atomic" in name for name in code.accesses):
        found.append("atomics: the order of sums would vary")
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("width", "rank"), SHAPES)
def test_block_delta(width: int, rank: int, target: str) -> None:
    config = block_delta_config(width, rank, 8192, is_amd=target.startswith("gfx"))
    assert problems(compile_block_delta(width, rank, target, config)) == []


@pytest.mark.parametrize("target", TARGETS)
def test_block_delta_for_few_rows(target: str) -> None:
    config = block_delta_config(4096, 16, 256, is_amd=target.startswith("gfx"))
    assert config.rows == 16
    assert problems(compile_block_delta(4096, 16, target, config, torch.float16)) == []


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_every_candidate_that_the_gpu_script_measures_fits(rows: int) -> None:
    shapes = {shape for shape in candidates(8192, 64) if shape.rows == rows}
    config = shapes.pop()
    assert {(other.columns_in, other.stages) for other in shapes} <= {(config.columns_in, config.stages)}
    assert problems(compile_block_delta(8192, 64, "sm_90", config)) == []


@pytest.mark.parametrize("target", TARGETS)
def test_lora_rows(target: str) -> None:
    from preft_kernels.lora_rows import SPLIT, rows_down_kernel, rows_up_kernel
    from tests.kernels.aot import compile_for

    shape = {"RANK": 16, "PADDED": 16, "SLICES": 3, "PARTS": SPLIT, "COLUMNS": 256}
    pointers = {"rows_ptr": "*i32", "slots_ptr": "*i32", "inner_ptr": "*fp32", "scales_ptr": "*fp32"}
    numbers = dict.fromkeys(("x_ptr", "y_ptr", "up_ptr", "down0_ptr", "down1_ptr", "down2_ptr"), "*bf16")
    integers = dict.fromkeys(("width", "x_stride", "y_stride", "first_column", "slice_id"), "i32")
    for kernel in (rows_down_kernel, rows_up_kernel):
        types = {n: t for n, t in {**pointers, **numbers, **integers}.items() if n in kernel.arg_names}
        code = compile_for(kernel, types, shape, target, aligned=[name for name in types if name != "slice_id"])
        assert (code.stack, code.spills) == (0, 0)
        assert code.has_wide("load")


def test_the_gates_can_fail() -> None:
    greedy = BlockDeltaConfig(64, 256, 64, stages=5)
    found = problems(compile_block_delta(8192, 16, "sm_80", greedy))
    assert any("shared" in problem for problem in found), found
    from preft_kernels.block_delta import block_delta_kernel, constants
    from tests.kernels.aot import compile_for

    config = block_delta_config(4096, 16, 8192)
    names = [name for name in block_delta_kernel.arg_names if name.endswith("_ptr")]
    types = {
        name: "*i32" if name in ("ranks_ptr", "header_ptr", "tiles_ptr", "rows_ptr") else "*bf16" for name in names
    }
    types |= {"hidden_stride": "i32", "residual_stride": "i32"}
    shape = constants(16, 4096, config, has_residual=True, dtype=torch.bfloat16)
    unaligned = compile_for(block_delta_kernel, types, shape, "sm_90", aligned=[])
    assert any("accesses" in problem for problem in problems(unaligned))
