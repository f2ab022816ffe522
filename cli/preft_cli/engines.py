"""Starting an engine for a command: which ones there are, and how the vLLM one is kept quiet."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.errors import EngineError, UsageError

if TYPE_CHECKING:
    from preft.serve.engine import Engine

DTYPES = ("auto", "float32", "bfloat16", "float16")


def require_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    """Checks the value of a flag.

    Raises:
        UsageError: It is none of `choices`.
    """
    if value not in choices:
        raise UsageError(f"`{flag}` is not valid", got=f"`{value}`", accepted=", ".join(choices))


def vllm_is_installed() -> bool:
    """Whether there is a vllm to import."""
    return importlib.util.find_spec("vllm") is not None


def require_vllm() -> None:
    """Checks that vLLM can be imported.

    Raises:
        EngineError: It is not installed.
    """
    if not vllm_is_installed():
        raise EngineError(
            "vLLM is not installed",
            hint="use the Hugging Face path (`--engine hf`), or install it: `make setup` on CPU, `make gpu` on NVIDIA",
        )


def open_vllm(model: Path | str, adapters: Mapping[str, Path], *, loud: bool = False, **settings: Any) -> Engine:
    """Starts the vLLM engine in this process.

    Args:
        model: Checkpoint folder, known name, or hub id.
        adapters: Adapter folders by name.
        loud: Leave vLLM's progress bars on.
        settings: Fields of `EngineSettings`.

    Raises:
        EngineError: vLLM is not installed or does not start.
    """
    require_vllm()
    from preft.serve.engine import Engine
    from preft.serve.settings import EngineSettings

    bars = {} if loud else {"use_tqdm_on_load": False}
    return Engine(model, adapters, settings=EngineSettings(**settings, vllm=bars))
