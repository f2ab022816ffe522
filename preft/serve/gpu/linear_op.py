"""vLLM's own LoRA kernels, launched over a grid that fits the step.

vLLM launches over (all rows) x (all slots + 1), whatever the step holds: millions of thread blocks a layer that look at
their number and leave, once there are many slots. Both factors are known on the host: the rows of the longest group
and the number of groups. Handing the launcher a shorter view of the rows gives the same sums by the same blocks, and
none that is idle; rows are addressed through the sorted table, beyond the view's end too.

A captured graph keeps the grid that it was captured with, so while one is captured the grid stays vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SAME_SHAPE_FROM = 128
"""vLLM splits the input of a product into more parts for batches of fewer rows than this. A view that is not cut below
it gets the launch shape of the whole batch, and so the same sums in the same order."""


@dataclass(frozen=True)
class Grid:
    """The grid of a step.

    Attributes:
        rows: To launch over: those of the longest group, or more.
        groups: Entries of the slot table in use, base rows included.
    """

    rows: int
    groups: int

    @classmethod
    def fit(cls, longest: int, groups: int) -> Grid:
        """The smallest grid for groups of at most `longest` rows."""
        return cls(max(longest, SAME_SHAPE_FROM), groups)


def tight_shrink(
    shrink: Callable[..., None],
    x: torch.Tensor,
    downs: list[torch.Tensor],
    buffer: torch.Tensor,
    meta: tuple[torch.Tensor, ...],
    scale: float,
    grid: Grid | None,
) -> None:
    """Calls vLLM's `_lora_shrink`.

    Args:
        shrink: vLLM's function.
        x: [T, K].
        downs: A table for each slice.
        buffer: [slices, T, r] float32; zeroed and filled by vLLM.
        meta: What `LoRAKernelMeta.meta_args` gives for T tokens.
        scale: Of the update.
        grid: Of the step, or None for vLLM's own.
    """
    if grid is None or grid.rows >= x.shape[0]:
        shrink(x, downs, buffer, *(meta if grid is None else _with_groups(meta, grid)), scale)
        return
    # vLLM makes its input contiguous, and a copy would hold the first rows only.
    shrink(x.contiguous()[: grid.rows], downs, buffer, *_shorter(meta, grid), scale)


def tight_expand(
    expand: Callable[..., None],
    buffer: torch.Tensor,
    ups: list[torch.Tensor],
    y: torch.Tensor,
    meta: tuple[torch.Tensor, ...],
    offset_start: int,
    add_inputs: bool,
    grid: Grid | None,
) -> None:
    """Calls vLLM's `_lora_expand`; see `tight_shrink`. `y` is [T, sum of N]."""
    if grid is None or grid.rows >= buffer.shape[1]:
        meta = meta if grid is None else _with_groups(meta, grid)
    else:
        buffer, meta = buffer[:, : grid.rows], _shorter(meta, grid)
    expand(buffer, ups, y, *meta, offset_start, add_inputs)


def _with_groups(meta: tuple[torch.Tensor, ...], grid: Grid) -> tuple[torch.Tensor, ...]:
    return (*meta[:6], torch.tensor([grid.groups], dtype=torch.int32))


def _shorter(meta: tuple[torch.Tensor, ...], grid: Grid) -> tuple[torch.Tensor, ...]:
    token_slots, sorted_rows, *rest = _with_groups(meta, grid)
    return (token_slots[: grid.rows], sorted_rows[: grid.rows], *rest)


@dataclass
class LinearCalls:
    """What the opaque operations of linear sites look up: set by the punica wrapper before each forward pass.

    Attributes:
        shrink: vLLM's function.
        expand: vLLM's function.
        meta_args: From a number of tokens to vLLM's tables.
        grid: Of the step, or None for vLLM's own.
        launch: Whether the step has adapters; else the operations return at once.
        num_calls: Updates launched since the start.
    """

    shrink: Callable[..., None]
    expand: Callable[..., None]
    meta_args: Callable[[int], tuple[Any, ...]]
    grid: Grid | None = None
    launch: bool = False
    num_calls: int = 0


_calls: dict[str, LinearCalls] = {}
_library = torch.library.Library("preft_gpu_linear", "DEF")
_library.define("shrink(Tensor(a!) buffer, Tensor x, Tensor[] downs, float scale, str key) -> ()")
_library.define("expand(Tensor(a!) y, Tensor buffer, Tensor[] ups, int offset_start, bool add_inputs, str key) -> ()")


def bind(key: str, calls: LinearCalls) -> None:
    """Makes `calls` what operations under `key` look up."""
    _calls[key] = calls


def _shrink(buffer: torch.Tensor, x: torch.Tensor, downs: list[torch.Tensor], scale: float, key: str) -> None:
    calls = _calls[key]
    if calls.launch:
        grid = None if _is_capturing(x) else calls.grid
        tight_shrink(calls.shrink, x, downs, buffer, calls.meta_args(x.shape[0]), scale, grid)
        calls.num_calls += 1


def _expand(
    y: torch.Tensor, buffer: torch.Tensor, ups: list[torch.Tensor], offset_start: int, add_inputs: bool, key: str
) -> None:
    calls = _calls[key]
    if calls.launch:
        grid = None if _is_capturing(y) else calls.grid
        meta = calls.meta_args(buffer.shape[1])
        tight_expand(calls.expand, buffer, ups, y, meta, offset_start, add_inputs, grid)


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


for _device in ("CPU", "CUDA"):
    _library.impl("shrink", _shrink, _device)
    _library.impl("expand", _expand, _device)
_library.impl("shrink", lambda *_: None, "Meta")
_library.impl("expand", lambda *_: None, "Meta")
