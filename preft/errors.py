"""The one tree of errors that `preft` raises on purpose.

A message says what is wrong, what was found, what is accepted, and what to do next. The command line prints it and
exits with `exit_code`; the HTTP front end answers with `http_status`. Every class is also a standard-library type,
so that callers who do not know `preft` still catch what they expect, and every instance survives pickling, since
errors cross process boundaries between an engine and its front end.
"""

from __future__ import annotations

from typing import Any


class PreftError(Exception):
    """Base of all errors raised by `preft`.

    Args:
        what: One sentence, no final period: what is wrong.
        got: What was found, or None.
        accepted: What would be accepted, or None.
        hint: What to do next, or None.
    """

    exit_code = 1
    http_status = 400

    def __init__(
        self, what: str, *, got: str | None = None, accepted: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.got = got
        self.accepted = accepted
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.got is not None:
            lines.append(f"  got: {self.got}")
        if self.accepted is not None:
            lines.append(f"  accepted: {self.accepted}")
        if self.hint is not None:
            lines.append(f"\nhint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.got, self.accepted, self.hint)

    def to_dict(self) -> dict[str, str]:
        """Returns the parts of the message that are set, for `--json` and HTTP bodies."""
        parts = {
            "type": type(self).__name__,
            "message": self.what,
            "got": self.got,
            "accepted": self.accepted,
            "hint": self.hint,
        }
        return {key: value for key, value in parts.items() if value is not None}


def _rebuild(kind: type[PreftError], what: str, got: str | None, accepted: str | None, hint: str | None) -> PreftError:
    return kind(what, got=got, accepted=accepted, hint=hint)


class UsageError(PreftError, ValueError):
    """A flag or an argument that cannot be meant as it stands."""

    exit_code = 2


class AdapterError(PreftError, ValueError):
    """An adapter that cannot be read, is inconsistent, or does not fit its base."""


class UnsupportedError(PreftError, NotImplementedError):
    """Something valid elsewhere that `preft` refuses by name, with what to do instead."""


class BaseMismatchError(AdapterError):
    """The adapter was made for another base model."""


class UnknownAdapterError(PreftError, LookupError):
    """A name that no adapter is registered under."""

    http_status = 404


class RequestError(PreftError, ValueError):
    """A request that cannot be served as it stands (boundary, prompt, name)."""


class FileError(PreftError, OSError):
    """A path that cannot be read or written."""

    def __init__(
        self, what: str, *, got: str | None = None, accepted: str | None = None, hint: str | None = None
    ) -> None:
        PreftError.__init__(self, what, got=got, accepted=accepted, hint=hint)


class EngineError(PreftError, RuntimeError):
    """The engine, or the library underneath it, is not in a state that can be trusted."""

    http_status = 500


class BoundaryUnknownError(PreftError, RuntimeError):
    """A forward pass under a prompt-only adapter did not say where the prompt ends."""
