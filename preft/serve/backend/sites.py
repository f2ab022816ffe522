"""The modules of the running model that take adapters, and how each calls for its update.

vLLM wraps its linear modules itself; each wrapped module asks its "punica wrapper" for the update. Here every module
gets a wrapper of its own, which knows which module it serves, so the update works on that module's packed numbers
instead of on padded stacks for all slots. A block-output site is a wrapper on the decoder layer's class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from preft.serve.backend.decoder_layers import Residual
from preft.serve.backend.step_rows import NO_ROWS, StepRows
from preft_kernels.grouped import UpdatePlan, plan_updates, run_updates
from preft_kernels.packed import PackedSite
from preft_kernels.rows import Run, clip_runs
from preft_kernels.stacks import StackCache


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter as this worker uses it.

    Attributes:
        digest: Its identity.
        sites: By module index (see `ModuleInfo.index`); None where it has nothing.
        num_bytes: Of all tensors.
    """

    digest: str
    sites: tuple[PackedSite | None, ...]
    num_bytes: int


@dataclass
class StepState:
    """What every site of one model shares: this step's rows, and the adapters they need.

    Attributes:
        rows: Of the step; set by `begin` before each forward pass.
        active: Adapter id to its numbers, for the ids in `rows`.
        prompt_hidden: While prompt log-probabilities are computed, the step's hidden states [T, D]; else None.
        num_products: Matrix products run for adapters since the start; a pure-decode step adds none.
        stacks: Stacked weights of adapters that decode, kept between steps.
        num_calls: By module index, how often it applied an update; the canary's proof that it is wired.
    """

    rows: StepRows = NO_ROWS
    active: dict[int, PackedAdapter] = field(default_factory=dict)
    prompt_hidden: torch.Tensor | None = None
    num_products: int = 0
    num_calls: dict[int, int] = field(default_factory=dict)
    stacks: StackCache | None = None
    _plans: dict[int, UpdatePlan] = field(default_factory=dict)

    def begin(self, rows: StepRows, active: dict[int, PackedAdapter]) -> None:
        """Sets the step about to run."""
        if rows != self.rows or not _same(self.active, active):
            self._plans.clear()
        self.rows, self.active = rows, active

    def update(self, index: int, y: torch.Tensor, x: torch.Tensor, runs: Sequence[Run]) -> None:
        """Adds the updates of one module to `y` in place."""
        self.num_products += run_updates(self._plan(index, runs), y, x)
        self.num_calls[index] = self.num_calls.get(index, 0) + 1

    def _plan(self, index: int, runs: Sequence[Run]) -> UpdatePlan:
        """The products of one module. Steps that decode the same requests have the same, so they are kept."""
        is_whole = runs is self.rows.token_runs or runs is self.rows.sample_runs
        plan = self._plans.get(index) if is_whole else None
        if plan is None:
            sites = [[self.active[slot].sites[index] for slot in run.slots] for run in runs]
            plan = plan_updates(runs, sites, stacks=self.stacks, module=index)
            if is_whole:
                self._plans[index] = plan
        return plan


def _same(before: Mapping[int, PackedAdapter], after: Mapping[int, PackedAdapter]) -> bool:
    return before.keys() == after.keys() and all(before[slot] is adapter for slot, adapter in after.items())


class LinearSite:
    """What a wrapped linear module sees as its punica wrapper."""

    def __init__(self, state: StepState, index: int) -> None:
        self._state = state
        self._index = index

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        """Adds the adapters' updates to `y` [T, d_out] in place; `x` is [T, d_in]. vLLM's stacks are not used."""
        runs = self._state.rows.token_runs
        if runs:
            self._state.update(self._index, y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), runs)


class LogitsSite:
    """What the logits processor sees as its punica wrapper, where `lm_head` takes adapters.

    Logits are computed for sampled rows and, when prompt log-probabilities are wanted, for slices of the prompt's
    rows. Which of the two a call means is decided by where its input lies in memory.
    """

    def __init__(self, state: StepState, index: int) -> None:
        self._state = state
        self._index = index

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        """Adds the adapters' updates to the logits `y` [N, vocabulary] in place; `x` is [N, D]."""
        if not any(adapter.sites[self._index] is not None for adapter in self._state.active.values()):
            return
        runs = self._runs(x)
        if runs:
            self._state.update(self._index, y, x, runs)

    def _runs(self, x: torch.Tensor) -> Sequence[Run]:
        step = self._state.prompt_hidden
        if step is None:
            return self._state.rows.sample_runs
        first, remainder = divmod(x.data_ptr() - step.data_ptr(), step.stride(0) * step.element_size())
        if remainder or not 0 <= first <= step.shape[0] - x.shape[0]:
            raise RuntimeError("prompt logits were computed from rows that are not a slice of the step's hidden states")
        return clip_runs(self._state.rows.token_runs, first, first + x.shape[0])


class BlockSite:
    """The update at one decoder layer's output."""

    def __init__(self, state: StepState, index: int, residual: Residual) -> None:
        self._state = state
        self._index = index
        self._residual = residual

    def apply(self, output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Adds the update to the residual stream that `output` holds; the stream's first tensor is mutated."""
        runs = self._state.rows.token_runs
        if not runs or not any(adapter.sites[self._index] is not None for adapter in self._state.active.values()):
            return output
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        stream = hidden + output[1] if self._residual is Residual.SUM else hidden
        width = hidden.shape[-1]
        self._state.update(self._index, hidden.view(-1, width), stream.view(-1, width), runs)
        return output


def skip_without_rows(module: nn.Module, state: StepState) -> None:
    """Makes a module that vLLM wrapped call what it wraps, in steps without adapted rows.

    vLLM's wrapper asks for an update at every call: some 25 us a module in Python, 3 % of a decode step that nothing
    is adapted in. Not for a compiled forward pass, whose branches are taken when it is traced.
    """
    module.preft_state = state  # type: ignore[assignment]
    module.__class__ = _subclass(type(module), _skipping)  # type: ignore[arg-type]


def install_block_site(layer: nn.Module, site: BlockSite) -> None:
    """Makes a decoder layer apply `site` to its output."""
    layer.preft_site = site  # type: ignore[assignment]
    layer.__class__ = _subclass(type(layer), _sited)  # type: ignore[arg-type]


@cache
def _subclass(base: type[nn.Module], around: Callable[[type[nn.Module]], Callable[..., object]]) -> type[nn.Module]:
    """A class that differs from `base` in its forward pass alone, for modules that are there already.

    Module names, parameter names and weight reloading stay as they are, which replacing the module would not leave,
    and the forward pass stays an ordinary method, which a hook is not.
    """
    return type(f"Preft{base.__name__}", (base,), {"forward": around(base)})


def _skipping(base: type[nn.Module]) -> Callable[..., object]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if not self.preft_state.rows.token_runs:  # type: ignore[union-attr]
            return self.base_layer(*args, **kwargs)  # type: ignore[operator]
        return base.forward(self, *args, **kwargs)

    return forward


def _sited(base: type[nn.Module]) -> Callable[..., object]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return self.preft_site.apply(base.forward(self, *args, **kwargs))  # type: ignore[operator,union-attr]

    return forward
