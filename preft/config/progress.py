"""Progress as an interface: library code reports, the command line or a notebook draws. None means silent."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one piece of work."""

    def start(self, label: str, total: int | None) -> None:
        """Begins a stage. `total` is in the stage's own unit, or None where it is not known."""

    def advance(self, amount: int = 1) -> None:
        """Adds to the current stage."""

    def finish(self) -> None:
        """Ends the current stage."""
