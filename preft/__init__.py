"""Prefill-only finetuning: LLM adapters that act on prompt tokens and cost nothing in decode.

Names are resolved when first used, so that `import preft` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from preft.adapters.adapter import Adapter
    from preft.adapters.store import load_adapter, save_adapter
    from preft.data.requests import GenerationRequest, GenerationResult
    from preft.errors import PreftError
    from preft.positions import Policy
    from preft.serve.engine import Engine
    from preft.serve.settings import EngineSettings
    from preft.tuners.attach import attach

_NAMES = {
    "Adapter": "preft.adapters.adapter",
    "load_adapter": "preft.adapters.store",
    "save_adapter": "preft.adapters.store",
    "PreftError": "preft.errors",
    "Policy": "preft.positions",
    "Engine": "preft.serve.engine",
    "EngineSettings": "preft.serve.settings",
    "GenerationRequest": "preft.data.requests",
    "GenerationResult": "preft.data.requests",
    "attach": "preft.tuners.attach",
}

__all__ = [
    "Adapter",
    "Engine",
    "EngineSettings",
    "GenerationRequest",
    "GenerationResult",
    "Policy",
    "PreftError",
    "__version__",
    "attach",
    "load_adapter",
    "save_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'preft' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
