"""A reward function of the user's own, named as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from preft.errors import UsageError

PARAMETERS = ("prompt", "completion", "row")
_SHAPE = "def reward(prompt: str, completion: str, row: dict) -> float"


class UserReward:
    """Calls a function of the user's.

    Args:
        name: `module:function`.
        folder: Where its module is looked for before anywhere else; it stays on Python's path.

    Raises:
        UsageError: There is no such module or function, or it takes other arguments.
    """

    def __init__(self, name: str, folder: Path | str = ".") -> None:
        self.name = name
        self._function = load_function(name, folder)

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one completion; what the function raises is the caller's to report."""
        return self._function(prompt=prompt, completion=completion, row=row)


def load_function(name: str, folder: Path | str = ".") -> Callable[..., float]:
    """Finds a reward function; importing its module runs the module.

    Raises:
        UsageError: There is none, or it cannot be called as a reward.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError("A reward function has another name", got=f"`{name}`", accepted="`module:function`")
    path = str(Path(folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"The reward module `{module_name}` cannot be imported",
            got=str(error)[:200],
            accepted=f"a module in `{path}`, or an installed one",
            hint="`reward.path` names another folder",
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"`{module_name}` has no function `{attribute}`", got=f"{module.__file__}", accepted=_SHAPE)
    try:
        inspect.signature(function).bind(**dict.fromkeys(PARAMETERS))
    except (TypeError, ValueError) as error:
        raise UsageError(f"`{name}` cannot be called as a reward", got=str(error), accepted=_SHAPE) from None
    return function  # type: ignore[no-any-return]
