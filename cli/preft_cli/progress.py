"""Drawers of progress: a live line on a terminal, one plain line a stage anywhere else."""

from __future__ import annotations

import time

import rich.progress
from rich.console import Console


class LineProgress:
    """One line a stage, when it ends; for files, pipes and continuous integration."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._label = ""
        self._started = 0.0

    def start(self, label: str, total: int | None) -> None:
        """Begins a stage."""
        self._label, self._started = label, time.monotonic()

    def advance(self, amount: int = 1) -> None:
        """Nothing is drawn within a stage."""

    def finish(self) -> None:
        """Prints the stage and what it took."""
        self._console.print(f"{self._label}: {time.monotonic() - self._started:.1f} s")


class TerminalProgress:
    """A live line that becomes a plain one when the stage ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._lines = LineProgress(console)

    def start(self, label: str, total: int | None) -> None:
        """Begins a stage."""
        self._close()
        self._lines.start(label, total)
        columns: list[rich.progress.ProgressColumn] = [
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}", markup=False),
        ]
        if total is not None:
            columns += [rich.progress.BarColumn(), rich.progress.MofNCompleteColumn()]
        columns.append(rich.progress.TimeElapsedColumn())
        self._bar = rich.progress.Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(label, total=total)
        self._bar.start()

    def advance(self, amount: int = 1) -> None:
        """Adds to the current stage."""
        if self._bar is not None:
            self._bar.advance(self._task, amount)

    def finish(self) -> None:
        """Ends the current stage."""
        if self._bar is not None:
            self._close()
            self._lines.finish()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
