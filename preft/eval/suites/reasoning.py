"""Questions of reasoning-gym's generators, from a fixed seed, scored exactly.

The prompt asks for the answer after `Answer:` on the last line. `exact` takes what stands there; `flexible` takes the
last number or word of an answer that did not keep to the form. Both are judged by the generator's own scorer, and only
its full score counts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from preft.eval.suites.answers import answers_of, as_dataset, passed, require_digest

_FORM = "Think if you need to. Then give only the final answer on the last line, in this form:\nAnswer: <answer>"
_MARKED = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"[A-Za-z]+")


def documents(
    generator: str, size: int, seed: int, config: Mapping[str, Any] | None = None, sha256: str = "", **_: Any
) -> dict[str, Any]:
    """The questions of one generator.

    Raises:
        UsageError: The installed reasoning-gym makes other questions than the task's version stands for.
    """
    rows = question_rows(generator, size, seed, config)
    require_digest(rows, ("question", "answer"), sha256, f"preft_{generator}")
    return as_dataset(rows)


def question_rows(
    generator: str, size: int, seed: int, config: Mapping[str, Any] | None = None
) -> list[dict[str, str]]:
    """Rows with the question, its prompt, the answer, and what the scorer needs."""
    import reasoning_gym  # type: ignore[import-untyped]

    made = reasoning_gym.create_dataset(generator, size=size, seed=seed, **(config or {}))
    return [
        {
            "question": entry["question"],
            "prompt": f"{entry['question']}\n\n{_FORM}",
            "answer": str(entry["answer"]),
            "generator": generator,
            "entry": json.dumps(entry, default=str),
        }
        for entry in (made[index] for index in range(size))
    ]


def score(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """`exact` and `flexible`; `pass@k` counts exact answers."""
    answers = answers_of(results)
    is_right = functools.partial(_is_right, doc)
    loose = sum(is_right(marked_answer(answer)) or is_right(last_answer(answer, doc["answer"])) for answer in answers)
    return {**passed("exact", answers, lambda text: is_right(marked_answer(text))), "flexible": loose / len(answers)}


def marked_answer(text: str) -> str | None:
    """What stands after the last `Answer:`, without marks of emphasis and a final period."""
    found = _MARKED.findall(text)
    return _clean(found[-1]) if found else None


def last_answer(text: str, like: str) -> str | None:
    """The last number of a text, or its last word where `like`, the right answer, is not a number."""
    found = (_NUMBER if _NUMBER.fullmatch(like) else _WORD).findall(text)
    return _clean(found[-1]).replace(",", "") if found else None


def _clean(text: str) -> str:
    return text.strip().strip("*`$ ").removesuffix(".").strip("*`$ ")


def _is_right(doc: Mapping[str, Any], answer: str | None) -> bool:
    if not answer:
        return False
    return bool(_scorer(doc["generator"])(answer, json.loads(doc["entry"])) == 1.0)


@functools.cache
def _scorer(generator: str) -> Callable[[str, Mapping[str, Any]], float]:
    import reasoning_gym  # type: ignore[import-untyped]

    scorer: Callable[[str, Mapping[str, Any]], float] = reasoning_gym.get_score_answer_fn(generator)
    return scorer
