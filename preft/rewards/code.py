"""Whether code passes a row's unit tests; it runs in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preft.errors import RequestError
from preft.rewards.problems import asserted_problem, function_problem
from preft.rewards.sandbox import Limits, Program, require_sandbox, run_program


class PythonTestsReward:
    """1 for a completion whose code passes the row's `tests`, else 0.

    `tests` is a text or a list of statements. With `entry_point` in the row, `tests` defines `check(candidate)` and
    `stub` begins the program, as in HumanEval; without, they run as they stand, after `preamble`, as in MBPP.

    Args:
        limits: What a program may use.

    Raises:
        UnsupportedError: This machine cannot confine a process.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        require_sandbox()

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one completion; may be called from several threads.

        Raises:
            RequestError: The row has no tests.
        """
        return float(run_program(row_program(completion, row), self._limits).passed)


def row_program(completion: str, row: Mapping[str, Any]) -> Program:
    """A completion and its row's tests as a program.

    Raises:
        RequestError: The row has no tests.
    """
    tests = row.get("tests")
    lines = [tests] if isinstance(tests, str) else tests
    if not isinstance(lines, list) or not lines or not all(isinstance(line, str) for line in lines):
        raise RequestError("The row has no `tests`", got=repr(tests)[:60], accepted="a text, or a list of statements")
    entry_point = row.get("entry_point")
    if isinstance(entry_point, str):
        return function_problem(str(row.get("stub") or ""), completion, "\n".join(lines), entry_point)
    return asserted_problem(completion, lines, str(row.get("preamble") or ""))
