"""From exceptions to what a user sees: text and hint on stderr, an exit status, and under `--json` an object.

Under `--json` a failure is printed twice: for people on stderr, and as `{"error": {...}}` on stdout, so that a
program that reads stdout always gets JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import typer

from preft.errors import FileError, PreftError

OK, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130
BROKEN_PIPE = 141

_MACHINE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOMEM, errno.EMFILE}


def guarded(call: Callable[[], Any], *, as_json: bool) -> int:
    """Calls a command and turns whatever it raises into output and an exit status.

    Args:
        call: Returns None or an exit status.
        as_json: Also print errors as JSON on stdout.
    """
    try:
        result = call()
        sys.stdout.flush()
        status = result if isinstance(result, int) else OK
        if status == INTERRUPTED:  # the command-line library turns Ctrl-C into this status
            _say("interrupted")
        return status
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except PreftError as error:
        return _report(str(error), error.to_dict(), error.exit_code, as_json)
    except typer.TyperException as error:
        return _report_usage(error, as_json)
    except OSError as error:
        if error.errno not in _MACHINE_ERRNOS:
            return _report_internal(error, as_json)
        told = FileError(
            f"`{error.filename}` cannot be used" if error.filename else "A file cannot be used", got=error.strerror
        )
        return _report(str(told), told.to_dict(), FAILED, as_json)
    except Exception as error:
        return _report_internal(error, as_json)


def _report(text: str, document: dict[str, str], status: int, as_json: bool) -> int:
    _say(f"error: {text}")
    if as_json:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"error": document}), flush=True)
    return status


def _report_usage(error: typer.TyperException, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    hint = f"`{context.command_path} --help` shows what is accepted" if context is not None else None
    text = error.format_message().rstrip(".").replace("'", "`")
    document = {"type": "UsageError", "message": text, **({"hint": hint} if hint else {})}
    return _report(f"{text}\n\nhint: {hint}" if hint else text, document, error.exit_code, as_json)


def _report_internal(error: Exception, as_json: bool) -> int:
    what = f"internal error: {type(error).__name__}: {error}".splitlines()[0]
    document = {"type": "InternalError", "message": what}
    if os.environ.get("PREFT_TRACEBACK") == "1":
        traceback.print_exception(error)
        return _report(what, document, FAILED, as_json)
    try:
        descriptor, path = tempfile.mkstemp(prefix="preft-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"arguments: {sys.argv[1:]}\n\n")
            traceback.print_exception(error, file=file)
        hint = f"the traceback is in {path}; please report it. PREFT_TRACEBACK=1 prints it here"
    except OSError:
        hint = "PREFT_TRACEBACK=1 prints the traceback"
    return _report(f"{what}\n\nhint: {hint}", {**document, "hint": hint}, FAILED, as_json)


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


def _drop_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's last flush does not fail as well."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
