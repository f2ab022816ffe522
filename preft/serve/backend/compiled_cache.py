"""Compiled forward passes kept on disk, so that only the first start compiles.

vLLM 0.32 saves what it compiles on CPUs, but cannot load it: its loader asks for a method that only artifacts for GPUs
have, warns, and compiles again. Here the same artifact is saved under a name of ours and loaded as vLLM would.

The name holds vLLM's own factors (versions, environment, model, every setting, preft's own among them) and the table
of sites, since a graph holds their numbers. Artifacts are pickles in the user's cache folder, as vLLM's own are.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from preft.serve.backend.packing import ModuleInfo

_log = logging.getLogger(__name__)


def load(model: nn.Module, infos: Sequence[ModuleInfo]) -> int:
    """Loads what an earlier start has kept. Whatever does not load is compiled as if nothing had been kept.

    Args:
        model: The wrapped model, before its first forward pass.
        infos: Its sites.

    Returns:
        Number of modules that need no compilation any more.
    """
    loaded = 0
    for module in _to_compile(model):
        path = _path(module, infos)
        if not path.is_file():
            continue
        # Kernels are shared objects beside the artifact; torch looks for them where this points.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_kernels(path))
        try:
            module.aot_compiled_fn = _load(module, path)
        except Exception as error:  # whatever torch makes of a damaged or outdated file
            _log.warning("A kept compilation does not load and is made anew: %s (%s)", error, path)
            module.aot_compiled_fn = None
            continue
        module.was_aot_compile_fn_loaded_from_disk = True
        loaded += 1
    return loaded


def keep(model: nn.Module, infos: Sequence[ModuleInfo]) -> None:
    """Keeps what was compiled at this start. A failure costs the next start its time and nothing else."""
    for module in _to_compile(model):
        compiled = getattr(module, "aot_compiled_fn", None)
        if compiled is None or module.was_aot_compile_fn_loaded_from_disk:
            continue
        path = _path(module, infos)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            compiled.save_compiled_function(str(path))
        except Exception as error:  # pickling and file errors alike
            _log.warning("The compilation could not be kept: %s (%s)", error, path)


def _to_compile(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if not getattr(module, "do_not_compile", True) and hasattr(module, "aot_compile"):
            yield module


def _path(module: Any, infos: Sequence[ModuleInfo]) -> Path:
    """Where a module's artifact lies: inside the folder in which vLLM keeps its own and the kernels."""
    from vllm import envs
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.compilation.decorators import _model_hash_key

    factors = [*aot_compile_hash_factors(module.vllm_config), _model_hash_key(module.forward)]
    folder = hashlib.sha256(str(factors).encode()).hexdigest()
    sites = [(info.index, info.name, str(info.kind), info.in_features, info.out_features) for info in infos]
    name = f"preft-{hashlib.sha256(str(sites).encode()).hexdigest()[:16]}-{module.vllm_config.parallel_config.rank}"
    return Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache" / "torch_aot_compile" / folder / name


def _kernels(path: Path) -> Path:
    return path.parent / "inductor_cache"


def _load(module: Any, path: Path) -> Any:
    from vllm.compilation.decorators import _verify_source_unchanged
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(module.vllm_config), path.open("rb") as file:
        compiled: Any = torch.compiler.load_compiled_function(file, f_globals=module.forward.__globals__)
    _verify_source_unchanged(compiled.source_info(), module.vllm_config)
    compiled.disable_guard_check()
    return compiled
