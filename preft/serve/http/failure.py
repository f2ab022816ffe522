"""Why a server ended: the one line that matters, out of the log it left."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import preft.errors
from preft.errors import EngineError, PreftError

_PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*(?:\([^()]*\)(?:\x1b\[[0-9;]*m)*\s)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?)?"
)
_OURS = re.compile(r"(?:preft\.errors\.)(?P<kind>\w+): (?P<what>.+)")
_ANY = re.compile(r"(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit)|(?:\S+\.py|python\S*): error): .+")
_SYMPTOMS = ("Engine core initialization failed", "EngineDeadError", "Engine core proc", "BrokenPipeError")
_MAX_LINE = 500


def find_cause(log: Sequence[str]) -> PreftError | str | None:
    """What ended a server.

    Args:
        log: The last lines it wrote.

    Returns:
        preft's own error, rebuilt from its text; else the last line that names an error which is not the mere symptom
        of another; else None.
    """
    lines = [_PREFIX.sub("", line.rstrip("\n")) for line in log]
    for index in range(len(lines) - 1, -1, -1):
        match = _OURS.search(lines[index])
        kind = getattr(preft.errors, match["kind"], None) if match else None
        if match and isinstance(kind, type) and issubclass(kind, PreftError):
            return _rebuilt(kind, match["what"], lines[index + 1 : index + 8])
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index].strip()
        if _ANY.match(line) and not any(symptom in line for symptom in _SYMPTOMS):
            return _with_details(line, lines[index + 1 : index + 3])
    return None


def _with_details(line: str, following: Sequence[str]) -> str:
    """A validation error names nothing by itself; its next line, or the one after the field's name, does."""
    if "validation error" not in line:
        return line
    details = [text.strip() for text in following if text.strip()]
    return next((text for text in details if "error" in text), " ".join([line, *details]))


def _rebuilt(kind: type[PreftError], what: str, following: Sequence[str]) -> PreftError:
    parts: dict[str, str] = {}
    for line in following:
        name, colon, text = line.strip().partition(": ")
        if colon and name in ("got", "accepted", "hint"):
            parts.setdefault(name, text)
        elif line.strip():
            break
    return kind(what, got=parts.get("got"), accepted=parts.get("accepted"), hint=parts.get("hint"))


def end_of(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def ended_error(what: str, code: int, log: Sequence[str], *, hint: str) -> PreftError:
    """The error for a server that ended by itself.

    Args:
        what: When it ended, in one sentence.
        code: As `subprocess` reports it.
        log: The last lines it wrote.
        hint: What to do next, where the cause does not say.
    """
    cause = find_cause(log)
    if isinstance(cause, PreftError):
        return cause
    if cause is not None:
        got = f"{cause[:_MAX_LINE]} ({end_of(code)})"
    elif any("EngineDeadError" in line for line in log):
        got = "the engine died without a word; it may have been killed, or have run out of memory"
    else:
        got = end_of(code)
    return EngineError(what, got=got, hint=hint)
