"""The update of a block-output site as one opaque operation, so that a compiled model keeps it.

It says that it changes its first argument, and compilers keep the order. It is no place to split a graph: inside a
captured one it is a kernel launch like any other. What it works on is looked up by the site's name, and whether there
is anything to do is a flag on the host. A graph captured while the flag is down holds no launch at all: that is the
graph that pure-decode steps replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from preft.errors import EngineError
from preft.serve.backend.decoder_layers import Residual
from preft_kernels import dispatch
from preft_kernels.segments import PlanBuffer
from preft_kernels.tables import BlockTables

Update = Callable[[torch.Tensor, "torch.Tensor | None", BlockTables, PlanBuffer], object]


@dataclass
class BlockState:
    """What all block sites of one model share.

    Attributes:
        plan: The step's rows, on the device.
        launch: Whether the step has adapters, or a graph is captured for steps that have.
        num_calls: By site, updates launched since the last reset; replays of a graph are not counted.
        update: The implementation.
        is_closed: The engine has ended; its names may be taken over.
    """

    plan: PlanBuffer
    launch: bool = False
    num_calls: dict[str, int] = field(default_factory=dict)
    update: Update = dispatch.block_delta_
    is_closed: bool = False


_sites: dict[str, tuple[BlockState, BlockTables]] = {}
_library = torch.library.Library("preft_gpu", "DEF")
_library.define("block_site(Tensor(a!) hidden, Tensor? residual, str name) -> ()")


def _block_site(hidden: torch.Tensor, residual: torch.Tensor | None, name: str) -> None:
    state, tables = _sites[name]
    if not state.launch:
        return
    width = hidden.shape[-1]
    second = None if residual is None else residual.view(-1, width)
    state.update(hidden.view(-1, width), second, tables, state.plan)
    state.num_calls[name] = state.num_calls.get(name, 0) + 1


def _nothing(hidden: torch.Tensor, residual: torch.Tensor | None, name: str) -> None:
    """Shapes do not change."""


for _device in ("CPU", "CUDA"):
    _library.impl("block_site", _block_site, _device)
_library.impl("block_site", _nothing, "Meta")


class GraphBlockSite:
    """The update at one decoder layer's output, as the layer's own code calls it; see `sites.install_block_site`.

    Args:
        state: Shared.
        name: Of the site; part of compiled code, so the same in every process that runs the model.
        tables: Numbers of all slots.
        residual: How the layer returns the residual stream.

    Raises:
        EngineError: Another engine in this process, still running, has a site of this name: compiled code could not
            tell them apart.
    """

    def __init__(self, state: BlockState, name: str, tables: BlockTables, residual: Residual) -> None:
        known = _sites.get(name)
        if known is not None and known[0] is not state and not known[0].is_closed:
            raise EngineError("Two engines with block sites cannot share a process on GPUs", got=f"two `{name}`")
        _sites[name] = (state, tables)
        self._name = name
        self._residual = residual

    def apply(self, output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Adds the update to the residual stream that `output` holds; the stream's first tensor is changed."""
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        residual = output[1] if self._residual is Residual.SUM else None
        torch.ops.preft_gpu.block_site(hidden, residual, self._name)
        return output
