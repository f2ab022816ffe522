"""Which implementation of the block-output update runs for given tensors, and why.

Imports triton only when a GPU's tensors are to be worked on, or when asked for by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from preft_kernels.segments import PlanBuffer
    from preft_kernels.tables import BlockTables

IMPLEMENTATIONS = ("triton", "reference")
OLDEST_TRITON = (3, 6)
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_forced: ContextVar[str | None] = ContextVar("preft_kernels_forced", default=None)


@dataclass(frozen=True)
class Choice:
    """An implementation and the reason for it.

    Attributes:
        name: One of `IMPLEMENTATIONS`.
        reason: For logs and status.
    """

    name: str
    reason: str


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Runs the block under one implementation, whatever the tensors are. For tests and benchmarks.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation `{name}`; there are {', '.join(IMPLEMENTATIONS)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(hidden: torch.Tensor) -> Choice:
    """The implementation for a stream of this device, type and layout."""
    name = _forced.get()
    if name is not None:
        return Choice(name, "forced")
    if hidden.device.type != "cuda":
        return Choice("reference", f"tensors are on {hidden.device.type}; the Triton kernels run on GPUs")
    missing = why_no_triton()
    if missing is not None:
        return Choice("reference", missing)
    if hidden.dtype not in _TYPES:
        return Choice("reference", f"the Triton kernels do not serve {hidden.dtype}")
    if hidden.stride(-1) != 1:
        return Choice("reference", "rows of the stream are not contiguous")
    return Choice("triton", "a GPU, and a Triton that is recent enough")


@cache
def why_no_triton() -> str | None:
    """Why the Triton kernels cannot be imported here, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return None if found >= OLDEST_TRITON else f"Triton {triton.__version__} is older than the kernels are checked with"


def block_delta_(hidden: torch.Tensor, residual: torch.Tensor | None, tables: BlockTables, plan: PlanBuffer) -> Choice:
    """Adds the update of a block-output site at planned rows, in place.

    Returns:
        The implementation that ran.
    """
    choice = choose(hidden)
    if choice.name == "triton":
        from preft_kernels.block_delta import block_delta_ as launch

        launch(hidden, residual, tables, plan)
    else:
        from preft_kernels.reference import block_delta_reference

        block_delta_reference(hidden, residual, tables, plan.plan)
    return choice
