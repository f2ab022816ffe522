"""Triton's interpreter, repaired for bfloat16.

The interpreter keeps bfloat16 as 16-bit integers. Its products, sums and comparisons then work on the codes, with no
error, and its rounding from float32 truncates, where GPUs round to nearest even. `repair` replaces the three functions
by ones that widen to float32 first and round as GPUs do. `test_interpreter.py` shows that this is needed, and will
fail when a Triton no longer needs it.

What the interpreter cannot show: races inside a program or between programs (one operation ends before the next
begins), wrong alignment hints, shared memory limits, smallest sizes of products, and TF32, which it computes exactly.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def is_interpreting() -> bool:
    """Whether this process runs kernels in the interpreter. Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def repair() -> None:
    """Repairs the interpreter, once a process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    stock = builder.create_dot, builder.cast_impl, builder.binary_op

    def widened(operand: Any) -> np.ndarray:
        if operand.dtype.scalar != tl.bfloat16:
            return operand.data
        return (operand.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(widened(a), widened(b), dtype=d.data.dtype)
        return handle(product + d.data, d.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return stock[1](self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return handle(np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded), target.scalar)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return stock[2](self, left, right, operation)
        result = operation(widened(left), widened(right))
        if result.dtype == bool:
            return handle(result, tl.int1)
        return cast_impl(self, handle(result.astype(np.float32), tl.float32), tl.bfloat16)

    builder.create_dot, builder.cast_impl, builder.binary_op = create_dot, cast_impl, binary_op
