"""Where output goes: data to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType

from preft.config.progress import Progress
from preft_cli.environment import hush

_UNLIMITED = 10_000


class Session:
    """The output side of one command.

    Args:
        as_json: Data is printed as JSON.
        quiet: Nothing but errors on stderr.
        verbose: The libraries' own logs are left on.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        hush(verbose=verbose)
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    def emit(self, document: Any) -> None:
        """Prints one JSON value on a line of its own."""
        print(json.dumps(document, ensure_ascii=False), flush=True)

    def show(self, *parts: RenderableType) -> None:
        """Prints data for people."""
        with self.out.capture() as drawn:
            for part in parts:
                self.out.print(part)
        # Tables pad their last column; nobody wants that in a file or when copying.
        self.out.file.write("\n".join(line.rstrip() for line in drawn.get().split("\n")))
        self.out.file.flush()

    def note(self, text: str) -> None:
        """Says something beside the data."""
        if not self.quiet:
            self.err.print(text)

    def warn(self, text: str) -> None:
        """Says something that should not be missed; not silenced by `--quiet`."""
        self.err.print(f"warning: {text}")

    @contextlib.contextmanager
    def diverted(self) -> Iterator[None]:
        """Keeps whatever else writes to stdout, compiled libraries included, from mixing with the data.

        It goes to stderr under `--verbose`, and nowhere otherwise.
        """
        sys.stdout.flush()
        try:
            kept = os.dup(1)
        except OSError:  # there is no stdout to protect
            yield
            return
        elsewhere = os.dup(2) if self.verbose else os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(elsewhere, 1)
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            os.close(elsewhere)

    def progress(self) -> Progress | None:
        """A drawer of progress, or None for silence."""
        if self.quiet:
            return None
        from preft_cli.progress import LineProgress, TerminalProgress

        return TerminalProgress(self.err) if self.err.is_terminal else LineProgress(self.err)


def _console(stream: TextIO) -> Console:
    """A console that never wraps what goes into a file or a pipe, and never reads markup in users' text."""
    width = None if stream.isatty() else _UNLIMITED
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)
