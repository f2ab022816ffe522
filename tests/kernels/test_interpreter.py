"""The interpreter is wrong for bfloat16 as it comes, and right once repaired."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.interpreter import repair

pytestmark = pytest.mark.interpreter


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr):
    at = tl.arange(0, 16)
    square = at[:, None] * 16 + at[None, :]
    tl.store(out_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


@triton.jit
def round_kernel(value_ptr, out_ptr):
    tl.store(out_ptr, tl.load(value_ptr).to(tl.bfloat16))


@triton.jit
def sum_kernel(a_ptr, b_ptr, out_ptr):
    tl.store(out_ptr, tl.load(a_ptr) + tl.load(b_ptr))


def _product() -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(16, 16).bfloat16() for _ in range(2))
    out = torch.zeros(16, 16)
    product_kernel[(1,)](a, b, out)
    return out, a.float() @ b.float()


def _rounded(value: float) -> float:
    out = torch.zeros(1, dtype=torch.bfloat16)
    round_kernel[(1,)](torch.tensor([value]), out)
    return float(out)


def _sum(a: float, b: float) -> float:
    out = torch.zeros(1, dtype=torch.bfloat16)
    sum_kernel[(1,)](torch.tensor([a]).bfloat16(), torch.tensor([b]).bfloat16(), out)
    return float(out)


TIE, ABOVE = 1 + 2**-8, 1 + 2**-8 + 2**-9
"""Halfway between two bfloat16 values, where even is below; and above halfway."""


def test_repaired() -> None:
    found, wanted = _product()
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    assert _rounded(ABOVE) == float(torch.tensor(ABOVE).bfloat16()) == 1 + 2**-7
    assert _rounded(TIE) == float(torch.tensor(TIE).bfloat16()) == 1
    assert _rounded(float("nan")) != _rounded(float("nan"))
    assert _sum(1.5, 2.25) == 3.75


def test_the_repair_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert InterpreterBuilder.create_dot.__module__ == repair.__module__, "the suite runs unrepaired"
    for name, function in _stock_functions().items():
        monkeypatch.setattr(InterpreterBuilder, name, function)
    found, wanted = _product()
    assert not torch.allclose(found, wanted, rtol=0, atol=1), "products of bfloat16 are right without the repair"
    assert _rounded(ABOVE) == 1, "rounding to bfloat16 is right without the repair"


def _stock_functions() -> dict[str, object]:
    """What the repair replaced: its functions hold on to them."""
    closure = InterpreterBuilder.cast_impl.__closure__ or ()
    stock = next(cell.cell_contents for cell in closure if isinstance(cell.cell_contents, tuple))
    return dict(zip(("create_dot", "cast_impl", "binary_op"), stock, strict=True))
