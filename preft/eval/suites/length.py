"""Does a text have the length that was asked for? After LongBench-Write.

Source of the score: Bai et al., "LongWriter: Unleashing 10,000+ Word Generation from Long Context LLMs" (2024), section
2, and THUDM/LongWriter `evaluation/eval_length.py`: with l words asked for and l' written, 100 * max(0, 1 - (l'/l - 1)
/ 3) where it is longer, 100 * max(0, 1 - (l/l' - 1) / 2) where it is shorter. Here it is a share, without the 100, as
the statistics take what lies between 0 and 1 for one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from preft.eval.suites.answers import answers_of, as_dataset
from preft.eval.suites.registry import suites_folder

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_FLOOR = 0.5
"""Words that an empty text counts as in the ratio, which has no logarithm at 0."""


def documents(lengths: Sequence[int], **_: Any) -> dict[str, Any]:
    """Every subject once, with the lengths taken in turn."""
    text = (suites_folder() / "subjects.jsonl").read_text(encoding="utf-8")
    subjects = [json.loads(line)["subject"] for line in text.splitlines()]
    rows = [
        {"prompt": f"{subject} Write about {words} words.", "words": words}
        for index, subject in enumerate(subjects)
        for words in (lengths[index % len(lengths)],)
    ]
    return as_dataset(rows)


def score(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """`length_score`, and the signed `log_ratio` of words written to words asked for: above 0 is too long."""
    written = [count_words(answer) for answer in answers_of(results)]
    scores = [length_score(doc["words"], count) for count in written]
    ratios = [math.log(max(count, _FLOOR) / doc["words"]) for count in written]
    return {
        "length_score": sum(scores) / len(scores),
        "log_ratio": sum(ratios) / len(ratios),
        "words": sum(written) / len(written),
    }


def length_score(asked: int, written: int) -> float:
    """S_l / 100; see the module."""
    if written > asked:
        return max(0.0, 1.0 - (written / asked - 1.0) / 3.0)
    return max(0.0, 1.0 - (asked / written - 1.0) / 2.0) if written else 0.0


def count_words(text: str) -> int:
    """Words of a text in an alphabet; a hyphen or an apostrophe does not part one."""
    return len(_WORD.findall(text))
