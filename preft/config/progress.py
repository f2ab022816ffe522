"""Progress as an interface: library code reports, the command line or a notebook draws. None means silent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one piece of work."""

    def start(self, label: str, total: int | None) -> None:
        """Begins a stage. `total` is in the stage's own unit, or None where it is not known."""

    def advance(self, amount: int = 1) -> None:
        """Adds to the current stage."""

    def finish(self) -> None:
        """Ends the current stage."""


@contextlib.contextmanager
def stage(progress: Progress | None, label: str, total: int | None = None) -> Iterator[None]:
    """Reports the body of a `with` block as one stage; does nothing where `progress` is None."""
    if progress is None:
        yield
        return
    progress.start(label, total)
    try:
        yield
    finally:
        progress.finish()
