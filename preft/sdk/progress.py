"""Progress in notebooks and terminals, by tqdm."""

from __future__ import annotations

import sys
from typing import Any

from preft.config.progress import Progress


class TqdmProgress:
    """A bar for each stage; in a notebook a widget where the front end has one, text elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None

    def start(self, label: str, total: int | None) -> None:
        """Begins a stage."""
        from tqdm.auto import tqdm

        self.finish()
        self._bar = tqdm(total=total, desc=label, leave=False)

    def advance(self, amount: int = 1) -> None:
        """Adds to the current stage."""
        if self._bar is not None:
            self._bar.update(amount)

    def finish(self) -> None:
        """Ends the current stage."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def default_progress(wanted: bool | None) -> Progress | None:
    """A bar if it is wanted; where that is not said, in notebooks and terminals only."""
    if wanted is None:
        wanted = in_notebook() or sys.stderr.isatty()
    return TqdmProgress() if wanted else None


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    return "ipykernel" in sys.modules
