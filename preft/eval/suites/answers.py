"""What all packaged tasks share: documents for the harness, and one or several answers a document.

Asked once, a document gives its plain score. Asked n times, it gives the mean of its n scores, and `pass@k` beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from preft.errors import UsageError
from preft.eval.passk import pass_at_k, reported_k


def as_dataset(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The test split that the harness asks for."""
    import datasets

    return {"test": datasets.Dataset.from_list([dict(row) for row in rows])}


def require_digest(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], expected: str, task: str) -> None:
    """Checks that documents are those that the task's version stands for.

    Raises:
        UsageError: They differ: scores would not compare with those of the same version made elsewhere.
    """
    found = digest_of(rows, keys)
    if found != expected:
        raise UsageError(
            f"The examples of `{task}` are not those of this version of the task",
            got=f"SHA-256 {found[:16]}...",
            accepted=f"{expected[:16]}...",
            hint="install the release of the library that preft's lock file names",
        )


def digest_of(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """SHA-256 of some columns of the documents."""
    text = json.dumps([[row[key] for key in keys] for row in rows], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def keep_all(resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A filter of the harness that keeps every answer; its own default keeps the first."""
    del docs
    return [list(answers) for answers in resps]


def answers_of(results: Sequence[Any]) -> list[str]:
    """The answers to one document, from what the harness hands to a scorer."""
    (answers,) = results
    return [answers] if isinstance(answers, str) else list(answers)


def passed(name: str, answers: Sequence[str], is_right: Callable[[str], bool]) -> dict[str, float]:
    """Scores 0/1 answers to one document.

    Args:
        name: What the metric is called.
        answers: One or several.
        is_right: Judges one.

    Returns:
        The share of right answers and, with several, the unbiased estimate of `pass@k`.
    """
    right = sum(is_right(answer) for answer in answers)
    found = {name: right / len(answers)}
    if len(answers) > 1:
        found.update({f"pass@{k}": pass_at_k(len(answers), right, k) for k in reported_k(len(answers))})
    return found
