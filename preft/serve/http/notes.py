"""What is known of a request while it is under way: who asks, what for, and how far it is.

One note a request, made before anything else sees it and found again by every part that handles it. From the notes
follow which adapters are in use, what a limited key may see, and the access log.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preft.serve.registry import Registered

logger = logging.getLogger(__name__)

_MAX_TEXT = 200
"""Characters that the log takes of what a client chose."""


@dataclass(eq=False)
class Note:
    """One request.

    Attributes:
        method: HTTP method, or `WEBSOCKET`.
        path: Path of the URL.
        allowed: Adapters that its key may use, or None for all.
        model: What it named as `model`.
        entry: The adapter that this meant when it arrived, or None for the base model.
        body: Its body as it came in, while it is being read.
        request_id: The engine's name for it.
        prompt_tokens: Tokens of its prompts.
        adapted_tokens: Those of them that the adapter acts on.
        cached_tokens: Those of them that came out of the prefix cache.
        output_tokens: Tokens generated.
        status: HTTP status of the answer.
        started: When it arrived, by `time.perf_counter`.
    """

    method: str
    path: str
    allowed: frozenset[str] | None = None
    model: str | None = None
    entry: Registered | None = None
    body: bytearray = field(default_factory=bytearray)
    request_id: str | None = None
    prompt_tokens: int = 0
    adapted_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None
    started: float = field(default_factory=time.perf_counter)

    def may_use(self, name: str) -> bool:
        """Whether the request's key may use an adapter, and know that there is one of that name."""
        return self.allowed is None or name in self.allowed

    def to_dict(self) -> dict[str, Any]:
        """The line of the access log; `adapter` and `digest` are null for the base model."""
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "request_id": _short(self.request_id),
            "method": _short(self.method),
            "path": _short(self.path),
            "model": _short(self.model),
            "digest": self.entry.digest if self.entry is not None else None,
            "prompt_tokens": self.prompt_tokens,
            "adapted_tokens": self.adapted_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "status": self.status,
            "ms": round(1000 * (time.perf_counter() - self.started), 1),
        }


def _short(text: str | None) -> str | None:
    return text[:_MAX_TEXT] if text else text


_current: ContextVar[Note | None] = ContextVar("preft_note", default=None)


def current_note() -> Note | None:
    """The note of the request that is being handled, or None outside of any."""
    return _current.get()


class Notes:
    """The notes of all requests under way.

    Args:
        log: File that gets one line of JSON a request, appended to; None for no log.
    """

    def __init__(self, log: str | None = None) -> None:
        self._live: set[Note] = set()
        self._log: int | None = None
        self._log_failed = self._is_torn = False
        if log is not None:
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)

    @contextmanager
    def open(self, note: Note) -> Iterator[Note]:
        """Keeps a note while its request is handled, then logs it."""
        token = _current.set(note)
        self._live.add(note)
        try:
            yield note
        finally:
            self._live.discard(note)
            _current.reset(token)
            self._write(note)

    def digests(self) -> Collection[str]:
        """Digests of the adapters that requests under way have asked for."""
        return {note.entry.digest for note in self._live if note.entry is not None}

    def count(self, name: str) -> int:
        """How many requests under way asked for an adapter by this name."""
        return sum(note.entry is not None and note.entry.name == name for note in self._live)

    def _write(self, note: Note) -> None:
        if self._log is None:
            return
        try:
            # One write a line: lines of several processes stay whole. A full disk may take half of one.
            line = b"\n" * self._is_torn + json.dumps(note.to_dict()).encode() + b"\n"
            self._is_torn = os.write(self._log, line) < len(line)
        except OSError as error:
            if not self._log_failed:
                logger.warning("The access log cannot be written: %s", error.strerror)
            self._log_failed = True
