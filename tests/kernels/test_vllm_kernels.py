"""vLLM's own LoRA kernels, unchanged, in the interpreter: base rows are left alone, and the tight grid changes nothing.

vLLM turns its Triton off on machines without a GPU. Here its modules are imported with Triton on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preft_kernels.rows import Segment
from preft_kernels.segments import plan_rows
from preft_kernels.tolerances import error_bound
from tests.kernels.cases import BF16, F16

pytestmark = pytest.mark.interpreter

SLOTS, RANK, WIDTH, WIDE = 8, 16, 256, (128, 64)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """vLLM's kernel modules over the interpreter."""
    triton_utils = pytest.importorskip("vllm.triton_utils", reason="vLLM is not installed")
    import triton
    import triton.language as tl

    names = ("lora_kernel_metadata", "kernel_utils", "utils", "lora_shrink_op", "lora_expand_op")
    modules = [f"vllm.lora.ops.triton_ops.{name}" for name in names]
    before = (triton_utils.triton, triton_utils.tl)
    triton_utils.triton, triton_utils.tl = triton, tl
    for module in [name for name in sys.modules if name.startswith("vllm.lora.ops.triton_ops")]:
        del sys.modules[module]
    loaded = [importlib.import_module(name) for name in modules]
    assert "interpreter" in type(loaded[3]._lora_shrink_kernel).__module__, "vLLM's kernel is not interpreted"
    yield SimpleNamespace(meta=loaded[0].LoRAKernelMeta, shrink=loaded[3]._lora_shrink, expand=loaded[4]._lora_expand)
    triton_utils.triton, triton_utils.tl = before
    for module in modules:
        sys.modules.pop(module, None)


class Launches:
    """Counts programs of the launches made through one of vLLM's kernels."""

    def __init__(self, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs: list[int] = []
        holder = sys.modules[f"vllm.lora.ops.triton_ops.{module}"]
        kernel = getattr(holder, name)
        monkeypatch.setattr(holder, name, self)
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        count = 1
        for size in grid:
            count *= size
        self.programs.append(count)
        return self._kernel[grid]


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    downs = [(draw(SLOTS, 1, RANK, WIDTH) / WIDTH**0.5).to(dtype) for _ in WIDE]
    ups = [(draw(SLOTS, 1, wide, RANK) / RANK**0.5).to(dtype) for wide in WIDE]
    return draw(ROWS, WIDTH).to(dtype), draw(ROWS, sum(WIDE)).to(dtype), downs, ups


ROWS = 330
SEGMENTS = [Segment(40, 33, 5), Segment(80, 7, 1), Segment(90, 12, 5), Segment(149, 1, 7)]


def run(kernels: Any, dtype: torch.dtype, *, tight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, inner products) of one linear module, through the path that the punica wrapper takes."""
    from preft.serve.gpu.kernel_meta import KernelMeta
    from preft.serve.gpu.linear_op import SAME_SHAPE_FROM, Grid, tight_expand, tight_shrink

    x, y, downs, ups = batch(dtype)
    plan = plan_rows(SEGMENTS)
    tables = KernelMeta(ROWS + 10, SLOTS, "cpu", kernels.meta)
    tables.upload(plan, ROWS, launch=True)
    assert plan.longest < SAME_SHAPE_FROM < ROWS
    grid = Grid.fit(plan.longest, plan.num_slots + 1) if tight else None
    buffer = torch.full((len(WIDE), ROWS, RANK), torch.nan)
    meta = tables.meta.meta_args(ROWS, False)
    tight_shrink(kernels.shrink, x, downs, buffer, meta, 1.0, grid)
    tight_expand(kernels.expand, buffer, ups, y, meta, 0, True, grid)
    return y, buffer


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_against_float64_and_base_rows_untouched(kernels: Any, dtype: torch.dtype) -> None:
    found, _ = run(kernels, dtype, tight=True)
    x, y, downs, ups = batch(dtype)
    update = torch.zeros(ROWS, sum(WIDE), dtype=torch.float64)
    slots = plan_rows(SEGMENTS).slot_of_row(ROWS)
    for row, slot in enumerate(slots):
        if slot >= 0:
            pairs = zip(downs, ups, strict=True)
            update[row] = torch.cat([u[slot, 0].double() @ (d[slot, 0].double() @ x[row].double()) for d, u in pairs])
    base = torch.from_numpy(slots < 0)
    assert torch.equal(found[base], y[base])
    wanted = y.double() + update
    bound = error_bound(update[~base], wanted[~base], dtype)
    assert update[~base].norm() > 20 * bound
    assert (found.double() - wanted)[~base].norm() <= bound


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_tight_grid_gives_the_same_bits_with_fewer_programs(
    kernels: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink = Launches("lora_shrink_op", "_lora_shrink_kernel", monkeypatch)
    expand = Launches("lora_expand_op", "_lora_expand_kernel", monkeypatch)
    stock, stock_inner = run(kernels, dtype, tight=False)
    tight, tight_inner = run(kernels, dtype, tight=True)
    assert torch.equal(stock, tight)
    assert torch.equal(stock_inner, tight_inner)
    for launches in (shrink, expand):
        default, fitted = launches.programs
        # 9 groups of 330 rows against 4 groups of 128.
        assert fitted * 4 < default, launches.programs


def test_the_punica_wrapper_end_to_end(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's `add_lora_linear` through our operations into vLLM's kernels: what a wrapped module calls on a GPU."""
    from vllm.lora.punica_wrapper import punica_gpu

    from preft.serve.backend.step_rows import StepRows
    from preft.serve.gpu import punica
    from preft.serve.gpu.step import Step

    monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", kernels.meta, raising=False)
    monkeypatch.setattr(punica, "lora_kernels", lambda: kernels)
    config = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=False)
    wrapper = punica.PreftPunicaGPU(ROWS + 10, 16, "cpu", lora_config=config)
    launches = Launches("lora_shrink_op", "_lora_shrink_kernel", monkeypatch)
    x, y, downs, ups = batch(F16)
    before = y.clone()
    rows = StepRows(adapter_ids=(1, 5, 7), num_adapted=53)
    wrapper.set_step(Step(rows, plan_rows(SEGMENTS), ROWS), launch=True)
    wrapper.add_lora_linear(y, x, tuple(downs), tuple(ups), 1.0, WIDE)
    assert torch.equal(y, run(kernels, F16, tight=True)[0])
    assert launches.programs[0] == launches.programs[1]
    wrapper.set_step(Step(num_tokens=ROWS), launch=False)
    untouched = before.clone()
    wrapper.add_lora_linear(untouched, x, tuple(downs), tuple(ups), 1.0, WIDE)
    assert torch.equal(untouched, before)
    assert len(launches.programs) == 2, "a step without adapters launches nothing"
    # As while a graph for adapters is captured: launched over vLLM's whole grid, with nothing to do.
    wrapper.set_step(Step(num_tokens=ROWS), launch=True)
    wrapper.add_lora_linear(untouched, x, tuple(downs), tuple(ups), 1.0, WIDE)
    assert torch.equal(untouched, before)
    assert launches.programs[2] > 4 * launches.programs[0]
