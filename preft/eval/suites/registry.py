"""Where the packaged tasks are, and a task manager of the harness that knows them."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PREFIX = "preft_"
"""What the names of all packaged tasks begin with."""


def suites_folder() -> Path:
    """The folder of the definitions; the harness takes it as `include_path`."""
    return Path(str(importlib.resources.files("preft_templates").joinpath("suites")))


def task_manager(include_path: Path | None = None, *, include_defaults: bool = False) -> TaskManager:
    """A task manager that knows the packaged tasks.

    Args:
        include_path: A folder of further definitions, which win over packaged ones of the same name.
        include_defaults: Whether to read the harness's own definitions too, which takes seconds.
    """
    from lm_eval.tasks import TaskManager

    folders: list[str | Path] = [str(suites_folder())]
    if include_path is not None:
        folders.append(str(include_path))
    return TaskManager(include_path=folders, include_defaults=include_defaults)
