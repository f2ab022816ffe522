"""The arms of an evaluation: the base model, always, and adapters by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.adapters.catalog import require_name
from preft.errors import UsageError

BASE = "base"
"""What the arm without an adapter is called."""


@dataclass(frozen=True)
class Failure:
    """A request that an engine could not serve; its example counts for no comparison.

    Attributes:
        arm: Arm it was for.
        task: Task it belongs to, or None.
        doc_id: The example, or None.
        error: Parts of the error.
    """

    arm: str
    task: str | None
    doc_id: int | None
    error: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"arm": self.arm, "task": self.task, "doc_id": self.doc_id, "error": dict(self.error)}


def read_adapters(
    adapter: str | Path | None = None, adapters: Mapping[str, str | Path] | None = None
) -> dict[str, Path]:
    """The adapters of a harness model, by name.

    Args:
        adapter: One folder, called by the folder's name.
        adapters: Folders by name.

    Raises:
        UsageError: Both are given, or a name cannot be used.
    """
    if adapter is not None and adapters:
        raise UsageError("`adapter` and `adapters` exclude each other", accepted="one of them")
    named = {Path(adapter).name: adapter} if adapter is not None else (adapters or {})
    found = {require_name(name): Path(path) for name, path in named.items()}
    if BASE in found:
        raise UsageError(f"`{BASE}` is the base model's own arm", got="an adapter of that name", hint="rename it")
    return found


def require_arm(arm: str, adapters: Mapping[str, Path]) -> str:
    """Checks the name of an arm.

    Raises:
        UsageError: There is no such arm.
    """
    if arm != BASE and arm not in adapters:
        raise UsageError("There is no such arm", got=f"`{arm}`", accepted=", ".join([BASE, *adapters]))
    return arm


def adapter_of(arm: str) -> str | None:
    """The adapter's name as engines take it."""
    return None if arm == BASE else arm
