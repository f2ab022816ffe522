"""Instructions whose following a program can verify, in the manner of IFEval.

The prompts are ours; the verifiers are those of the harness's own `ifeval` task, except the two that need data from the
network (`length_constraints:number_sentences`, `change_case:capital_word_frequency`).

Source of the manner: Zhou et al., "Instruction-Following Evaluation for Large Language Models" (2023).
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from preft.eval.suites.answers import answers_of, as_dataset, passed
from preft.eval.suites.registry import suites_folder


def documents(**_: Any) -> dict[str, Any]:
    """The prompts with their instructions."""
    text = (suites_folder() / "instructions.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    # As text: columns of a data set hold one type each, and arguments differ from verifier to verifier.
    return as_dataset([{"prompt": row["prompt"], "instructions": json.dumps(row["instructions"])} for row in rows])


def score(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """Whether every instruction is followed (`prompt_strict`, `prompt_loose`), and the share of them (`inst_...`)."""
    answers = answers_of(results)
    verifiers = verifiers_of(doc)
    strict = [followed(verifiers, answer) for answer in answers]
    loose = [followed(verifiers, answer, loose=True) for answer in answers]
    by_answer = dict(zip(answers, strict, strict=True))
    return {
        **passed("prompt_strict", answers, lambda answer: all(by_answer[answer])),
        "prompt_loose": sum(all(found) for found in loose) / len(loose),
        "inst_strict": _share(strict),
        "inst_loose": _share(loose),
    }


def verifiers_of(doc: Mapping[str, Any]) -> list[Callable[[str], bool]]:
    """One verifier an instruction of a document."""
    registry = _registry()
    found = []
    for item in json.loads(doc["instructions"]):
        verifier = registry[item["id"]](item["id"])
        verifier.build_description(**item["arguments"])
        found.append(verifier.check_following)
    return found


def followed(verifiers: Sequence[Callable[[str], bool]], answer: str, *, loose: bool = False) -> list[bool]:
    """Which instructions an answer follows.

    Args:
        verifiers: One an instruction.
        answer: The answer.
        loose: Also try it without its first line, its last line, and asterisks: an introduction or an emphasis is
            then no fault. As the harness's `ifeval` does.
    """
    texts = _variants(answer) if loose else [answer]
    return [any(bool(text.strip()) and bool(verifier(text)) for text in texts) for verifier in verifiers]


def _variants(answer: str) -> list[str]:
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(text.replace("*", "") for text in cut)]


def _share(found: Sequence[Sequence[bool]]) -> float:
    """Mean over answers of the share of instructions that are followed."""
    return sum(sum(row) / len(row) for row in found) / len(found)


@functools.cache
def _registry() -> Mapping[str, Any]:
    """The harness's verifiers, which try to fetch a data set of nltk as they are imported; ours do not need it."""
    import langdetect  # type: ignore[import-untyped]
    import nltk  # type: ignore[import-untyped]

    download = nltk.download
    nltk.download = lambda *_args, **_kwargs: False
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from lm_eval.tasks.ifeval import instructions_registry
    finally:
        nltk.download = download
    # Its guess of the language of a short text is random otherwise.
    langdetect.DetectorFactory.seed = 0
    registry: Mapping[str, Any] = instructions_registry.INSTRUCTION_DICT
    return registry
