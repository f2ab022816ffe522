"""Prefill-only finetuning: LLM adapters that act on prompt tokens and cost nothing in decode.

Names are resolved when first used, so that `import preft` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from preft.version import __version__

if TYPE_CHECKING:
    from preft.adapters.adapter import Adapter
    from preft.adapters.store import load_adapter, save_adapter
    from preft.checks.check import check_adapter
    from preft.checks.inspect import inspect_adapter
    from preft.convert.export import export_peft
    from preft.convert.run import convert as convert_adapter
    from preft.data.requests import GenerationRequest, GenerationResult
    from preft.errors import PreftError
    from preft.positions import Policy
    from preft.sdk.asynchronous import AsyncEngine
    from preft.sdk.engine import Engine
    from preft.sdk.functions import evaluate, make_plan, run_bench, train_grpo, train_sft
    from preft.serve.settings import EngineSettings
    from preft.tuners.attach import attach

_NAMES = {
    "Adapter": "preft.adapters.adapter",
    "AsyncEngine": "preft.sdk.asynchronous",
    "Engine": "preft.sdk.engine",
    "EngineSettings": "preft.serve.settings",
    "GenerationRequest": "preft.data.requests",
    "GenerationResult": "preft.data.requests",
    "Policy": "preft.positions",
    "PreftError": "preft.errors",
    "attach": "preft.tuners.attach",
    "check_adapter": "preft.checks.check",
    "convert_adapter": "preft.convert.run:convert",
    "evaluate": "preft.sdk.functions",
    "export_peft": "preft.convert.export",
    "inspect_adapter": "preft.checks.inspect",
    "load_adapter": "preft.adapters.store",
    "make_plan": "preft.sdk.functions",
    "run_bench": "preft.sdk.functions",
    "save_adapter": "preft.adapters.store",
    "train_grpo": "preft.sdk.functions",
    "train_sft": "preft.sdk.functions",
}
"""Name to module, with the name inside it where that differs."""

__all__ = [
    "Adapter",
    "AsyncEngine",
    "Engine",
    "EngineSettings",
    "GenerationRequest",
    "GenerationResult",
    "Policy",
    "PreftError",
    "__version__",
    "attach",
    "check_adapter",
    "convert_adapter",
    "evaluate",
    "export_peft",
    "inspect_adapter",
    "load_adapter",
    "make_plan",
    "run_bench",
    "save_adapter",
    "train_grpo",
    "train_sft",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'preft' has no attribute {name!r}")
    module, _, inside = _NAMES[name].partition(":")
    return getattr(importlib.import_module(module), inside or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
