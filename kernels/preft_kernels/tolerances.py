"""How far a kernel may be from the specification, and why.

Norms are over all planned rows. With u the unit roundoff of the number type:

- the operands of both products are rounded to it: the stream, and the inner product of rank r. Each rounding is off by
  at most u relative to a value, independently, and carries over to the update in proportion;
- the output is rounded once: at most u of the output;
- sums over D are in float32: off by about sqrt(D) of its roundoff, taken four times for safety.

So   error <= 2 u |update| + u |output| + 4 sqrt(D) 2^-24 |update|.   Random errors mostly cancel and measured ones are
a third of it; a wrong row, column, slot, rank or a missing bias is off by the size of the update itself, some fifty
times the bound in bfloat16.

TF32 is not allowed for: in float32 the kernels ask for IEEE products.
"""

from __future__ import annotations

import math

import torch

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number."""


def error_bound(update: torch.Tensor, output: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest accepted norm of the difference to the exact output.

    Args:
        update: [P, D] float64: the exact updates of the planned rows.
        output: [P, D] float64: the exact outputs there.
        dtype: In which the kernel read and wrote.
    """
    roundoff = UNIT_ROUNDOFF[dtype]
    width = update.shape[-1]
    change, whole = float(update.norm()), float(output.norm())
    sums = 4 * math.sqrt(width) * 2.0**-24
    return (2 * roundoff + sums) * change + roundoff * whole
