"""Adapter sites inside a compiled forward pass: one opaque op each, which looks at the step's rows when it runs.

vLLM traces the model once and drops every guard, so a branch on the rows that Python took while tracing would be taken
for good. An op is a call that the compiler can neither look into nor leave out: it declares that it changes its first
argument. In a step without adapted rows it returns at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, infer_schema

from preft.errors import EngineError, UnsupportedError
from preft.serve.backend import guard
from preft.serve.backend.decoder_layers import Residual
from preft.serve.backend.sites import BlockSite, LinearSite, StepState

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

_SEAMS = {
    "vllm.compilation.caching:aot_compile_hash_factors": ("vllm_config",),
    "vllm.compilation.decorators:_model_hash_key": ("fn",),
    "vllm.compilation.decorators:_verify_source_unchanged": ("source_info", "vllm_config"),
    "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.aot_compile": ("self", "args", "kwargs"),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.warming_up_model": ("self",),
}
_bound: list[StepState] = []


def bind(state: StepState) -> None:
    """Makes `state` what the ops of this process read. A process holds one model with sites."""
    _bound[:] = [state]


def _linear_update(y: torch.Tensor, x: torch.Tensor, index: int) -> None:
    LinearSite(_bound[0], index).add_lora_linear(y, x)


def _block_update(hidden: torch.Tensor, residual: torch.Tensor | None, index: int) -> None:
    if residual is None:
        BlockSite(_bound[0], index, Residual.PLAIN).apply(hidden)
    else:
        BlockSite(_bound[0], index, Residual.SUM).apply((hidden, residual))


def _changes_no_shape(*_arguments: object) -> None:
    """What the compiler sees of an op."""


_ops = Library("preft", "FRAGMENT")
for _name, _function, _changed in (("linear_update", _linear_update, "y"), ("block_update", _block_update, "hidden")):
    _ops.define(_name + infer_schema(_function, mutates_args=[_changed]))
    _ops.impl(_name, _function, "CPU")
    _ops._register_fake(_name, _changes_no_shape)


class CompiledLinearSite(LinearSite):
    """A linear site that a compiled forward pass keeps."""

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *_args: object, **_kwargs: object) -> None:
        """Calls the op; `y` [T, d_out] is changed in place, `x` is [T, d_in]."""
        torch.ops.preft.linear_update(y, x, self._index)


class CompiledBlockSite(BlockSite):
    """A block site that a compiled forward pass keeps."""

    def apply(self, output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Calls the op on the residual stream that `output` holds; the stream's first tensor is changed."""
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        torch.ops.preft.block_update(hidden, output[1] if self._residual is Residual.SUM else None, self._index)
        return output


def restore_compilation(config: VllmConfig) -> None:
    """Turns on the compilation that vLLM sets up for CPUs and turns off again when it sees LoRA.

    Everything but the mode is left as vLLM has set it. Called before the model is built, which reads the mode.

    Raises:
        UnsupportedError: The engine was set to eager, has several ranks, or no C++ compiler is found.
        EngineError: vLLM left something else than what it compiles with on CPUs, or its private functions have changed.
    """
    from vllm.config import CompilationMode

    guard.require_signatures(_SEAMS)
    compilation = config.compilation_config
    if config.model_config.enforce_eager:
        raise UnsupportedError(
            "The engine is set to compile and to run eager", got="`compile` and `enforce_eager`", hint="leave one out"
        )
    if config.parallel_config.tensor_parallel_size > 1:
        raise UnsupportedError("Compilation over several ranks is not tested yet", hint="start without `compile`")
    _require_compiler()
    found = (str(compilation.backend), "none" in compilation.custom_ops, compilation.mode)
    if found != ("inductor", True, CompilationMode.NONE):
        raise EngineError(
            "vLLM's settings for compilation are not those that preft compiles with",
            got=f"backend `{compilation.backend}`, custom_ops {compilation.custom_ops}, mode {compilation.mode}",
            hint="leave vLLM's compilation settings as they are, or start without `compile`",
        )
    compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        raise UnsupportedError(
            "The engine is set to compile, but there is no C++ compiler",
            hint="install `g++` with Python's headers, name one in CXX, or start without `compile`",
        ) from None


def compiled_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that vLLM has compiled: their graph exists."""
    return [
        module
        for module in model.modules()
        if getattr(module, "compiled", False) or getattr(module, "aot_compiled_fn", None) is not None
    ]


def require_compiled(model: nn.Module) -> None:
    """Checks that something was compiled. Called after the warm-up.

    Raises:
        UnsupportedError: vLLM compiles no part of this model.
    """
    if not compiled_modules(model):
        raise UnsupportedError(
            f"vLLM does not compile `{type(model).__name__}`, so compilation would only slow it down",
            hint="start without `compile`",
        )


@contextmanager
def not_compiled(model: nn.Module) -> Iterator[None]:
    """Runs the model's own Python inside the block, with the same weights and cache."""
    modules = compiled_modules(model)
    for module in modules:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in modules:
            module.do_not_compile = False
