"""The processes of one run: a single one, or those that `torchrun` started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


def is_main_process() -> bool:
    """Whether this process writes the run's files and speaks for it."""
    return int(os.environ.get("RANK", "0")) == 0


class Processes:
    """Keeps the processes of a run in step; does nothing where there is one."""

    def __init__(self) -> None:
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            import torch
            from accelerate import PartialState

            self._state = PartialState(cpu=not torch.cuda.is_available())
        self.is_main = self._state is None or bool(self._state.is_main_process)

    def wait(self) -> None:
        """Returns when every process has come here."""
        if self._state is not None:
            self._state.wait_for_everyone()

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Lets the main process run the body before the others."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()
