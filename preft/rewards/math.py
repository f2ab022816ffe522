"""Whether a mathematical answer is right, by math-verify in a confined process, and numbers by themselves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from preft.errors import EngineError, RequestError, UnsupportedError
from preft.rewards.sandbox import end_guest, readable_folders, start_guest

ANSWER_KEY = "answer"
_GUEST = Path(__file__).with_name("math_guest.py")
_START_S = 60.0
_MAX_CHARACTERS = 20_000
_NUMBER = re.compile(r"[+-]?(\d{1,30}|\d{1,3}(,\d{3}){1,9})(\.\d{1,30})?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class MathReward:
    """1 for a right answer, else 0.

    A completion's answer is what math-verify finds in it: the last boxed expression, or else the last formula or
    number. The row's `answer` holds the right one; of GSM8K's form, it is what follows `####`.

    Args:
        timeout_s: For one comparison in seconds, after which the answer counts as wrong.
    """

    def __init__(self, timeout_s: float = 12.0) -> None:
        self._judge = _Judge(timeout_s)

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one completion.

        Raises:
            RequestError: The row has no answer.
            UnsupportedError: math-verify is not installed, or processes cannot be confined here.
        """
        gold = gold_answer(row)
        said, wanted = _plain_number(completion), _plain_number(gold)
        if said is not None and wanted is not None:
            return float(said == wanted)
        # The end holds the answer, and a text of megabytes holds none.
        return float(self._judge.equal(completion[-_MAX_CHARACTERS:], gold))

    def close(self) -> None:
        """Ends the process that compares; it starts again when it is needed."""
        self._judge.close()


def gold_answer(row: Mapping[str, Any]) -> str:
    """The right answer of a row.

    Raises:
        RequestError: It has none.
    """
    value = row.get(ANSWER_KEY)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise RequestError(
            f"The row has no `{ANSWER_KEY}`",
            got=repr(value)[:60],
            accepted="a number, or a text such as `\\frac{1}{2}`",
        )
    return str(value).rpartition("####")[2].strip()


def _plain_number(text: str) -> Fraction | None:
    """The number that a text is, boxed or not; None for anything else."""
    text = text.strip()
    boxed = _BOXED.fullmatch(text)
    text = boxed.group(1).strip() if boxed else text
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


class _Judge:
    """The confined process, started when it is first needed and again after it was killed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, answer: str, gold: str) -> bool:
        with self._lock:
            line = json.dumps([answer, gold]).encode() + b"\n"
            if self._process is None or self._process.poll() is not None:
                self._start()
            said = self._ask(line, self._timeout_s)
            if not isinstance(said, bool):
                # It took too long, or ran out of memory: whatever was said, it is not the answer.
                self._end()
                return False
            return said

    def close(self) -> None:
        with self._lock:
            self._end()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()

    def _start(self) -> None:
        self._end()
        self._process = start_guest(_GUEST, Path(tempfile.gettempdir()))
        said = self._ask(json.dumps({"readable": readable_folders()}).encode() + b"\n", _START_S)
        if isinstance(said, dict) and said.get("ready"):
            return
        self._end()
        if isinstance(said, dict):
            raise UnsupportedError("Answers cannot be compared on this machine", got=str(said.get("unconfined")))
        if importlib.util.find_spec("math_verify") is None:
            raise UnsupportedError("math-verify is not installed", hint="pip install 'preft[train]'")
        raise EngineError("The process that compares answers does not start")

    def _ask(self, line: bytes, timeout_s: float) -> Any:
        """One line there and one back; None if none comes."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        deadline, said = time.monotonic() + timeout_s, b""
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not said.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                piece = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not piece:
                    return None
                said += piece
        return json.loads(said)

    def _end(self) -> None:
        if self._process is not None:
            end_guest(self._process)
            self._process = None
