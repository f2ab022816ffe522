"""The program that `preft.rewards.sandbox` starts: reads a job, confines itself, runs it, and says how it went.

It is run by its path in an interpreter of its own, so it imports nothing of `preft` by name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import types
from typing import Any

DETAIL_CHARACTERS = 500


def main() -> None:
    """Runs one job: source texts one after the other in one namespace."""
    job = json.load(sys.stdin)
    channel = os.dup(1)
    os.set_inheritable(channel, False)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    answer = _Answer(channel, job["token"])
    kept = runpy.run_path(os.path.join(os.path.dirname(__file__), "confinement.py"))
    try:
        kept["die_with_parent"]()
        kept["limit"](cpu_s=job["cpu_s"], memory_bytes=job["memory_bytes"], file_bytes=job["file_bytes"])
        kept["confine"](job["readable"], job["writable"])
    except kept["ConfinementError"] as error:
        answer("unconfined", str(error))
        return
    os.write(channel, b"+")
    sources = job["sources"]
    del job
    _run(sources, answer)


def _run(sources: list[tuple[str, str]], answer: _Answer) -> None:
    module = types.ModuleType("solution")
    sys.modules["solution"] = sys.modules["__main__"] = module
    namespace: dict[str, Any] = module.__dict__
    try:
        with contextlib.redirect_stdout(_Nothing()), contextlib.redirect_stderr(_Nothing()):
            for name, source in sources:
                exec(compile(source, name, "exec"), namespace)
    except MemoryError:
        namespace.clear()
        answer("memory", "MemoryError")
    except BaseException as error:
        answer("failed", _describe(error))
    else:
        answer("passed", "")
    # Without the clean-up that the code may have registered: the answer is given.
    os._exit(0)


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = "an exception that cannot be described"
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in ("<solution>", "<tests>"):
            line = f" ({trace.tb_frame.f_code.co_filename[1:-1]}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return text[:DETAIL_CHARACTERS] + line


class _Answer:
    """Writes the answer with the token that shows that this program wrote it."""

    def __init__(self, channel: int, token: str) -> None:
        self._channel, self._token = channel, token

    def __call__(self, status: str, detail: str) -> None:
        os.write(self._channel, json.dumps({"token": self._token, "status": status, "detail": detail}).encode())


class _Nothing(io.TextIOBase):
    """A text file that forgets."""

    def write(self, text: str) -> int:
        return len(text)


if __name__ == "__main__":
    main()
