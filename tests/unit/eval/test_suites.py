"""The packaged tasks: what they ask, how answers are scored, and that the harness finds them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import itertools

import lm_eval
from lm_eval.models.dummy import DummyLM

from preft.errors import UnsupportedError, UsageError
from preft.eval.suites import PREFIX, humaneval, instructions, length, reasoning, suites_folder, task_manager
from preft.eval.suites.answers import passed
from preft.eval.tasks import find_tasks, load_tasks

REASONING = ("chain_sum", "gsm_symbolic", "letter_counting", "spell_backward", "word_sorting")
SAFE = (*(f"preft_{name}" for name in REASONING), "preft_instructions", "preft_length_long", "preft_length_short")


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    manager, names = find_tasks(["preft_reasoning", "preft_instructions", "preft_length"])
    tasks: dict[str, Any] = load_tasks(manager, names)["tasks"]
    return tasks


def test_every_definition_is_found_without_the_harness_s_own(loaded: dict[str, Any]) -> None:
    assert set(loaded) == set(SAFE)
    manager = task_manager()
    assert set(manager.all_subtasks) == {*SAFE, "preft_humaneval", "preft_humaneval_instruct"}
    assert all(name.startswith(PREFIX) for name in manager.all_tasks)
    assert len(list(suites_folder().glob("*.yaml"))) == len(manager.all_subtasks)


def test_every_task_has_a_version_and_enough_examples(loaded: dict[str, Any]) -> None:
    sizes = {name: len(task.eval_docs) for name, task in loaded.items()}
    assert {sizes[f"preft_{name}"] for name in REASONING} == {200}
    assert sizes["preft_instructions"] == 132
    assert sizes["preft_length_short"] == sizes["preft_length_long"] == 60
    assert all(task.config.metadata["version"] == 1.0 for task in loaded.values())


@pytest.mark.parametrize("generator", REASONING)
def test_the_right_answer_is_right_and_others_are_not(loaded: dict[str, Any], generator: str) -> None:
    task = loaded[f"preft_{generator}"]
    docs = list(task.eval_docs)
    for doc, other in itertools.pairwise(docs):
        right = doc["answer"]
        assert task.process_results(doc, [[f"Let me see.\nAnswer: {right}"]]) == {"exact": 1.0, "flexible": 1.0}
        assert task.process_results(doc, [[f"**Answer: {right}**"]])["exact"] == 1.0
        assert task.process_results(doc, [[""]]) == {"exact": 0.0, "flexible": 0.0}
        if other["answer"] != right:
            assert task.process_results(doc, [[f"Answer: {other['answer']}"]])["exact"] == 0.0
        assert task.process_results(doc, [[f"Answer: {right} or more"]])["exact"] == 0.0 or generator == "gsm_symbolic"


def test_arithmetic_is_right_by_python_itself(loaded: dict[str, Any]) -> None:
    """The generator's answers, worked out again."""
    for doc in loaded["preft_chain_sum"].eval_docs:
        (sums,) = re.findall(r"problem: ([\d +-]+) =", doc["question"])
        assert eval(sums) == int(doc["answer"])
    for doc in loaded["preft_spell_backward"].eval_docs:
        assert doc["question"].rpartition(" ")[2][::-1] == doc["answer"]


def test_an_answer_without_the_form_counts_as_flexible_only(loaded: dict[str, Any]) -> None:
    doc = loaded["preft_chain_sum"].eval_docs[3]
    assert doc["answer"] == "10"
    assert reasoning.score(doc, [["6 + 4 is 10."]]) == {"exact": 0.0, "flexible": 1.0}
    assert reasoning.score(doc, [["It is 1,0 or 9"]])["flexible"] == 0.0
    assert reasoning.last_answer("so 1,234.", "7") == "1234"
    assert reasoning.last_answer("the word is olleh!", "hello") == "olleh"


def test_other_questions_are_another_version() -> None:
    with pytest.raises(UsageError, match="not those of this version"):
        reasoning.documents("chain_sum", 5, 1, {}, sha256="0" * 64)


def test_several_answers_give_pass_at_k(loaded: dict[str, Any]) -> None:
    doc = loaded["preft_chain_sum"].eval_docs[3]
    found = reasoning.score(doc, [["Answer: 10", "Answer: 9", "Answer: 8", "10"]])
    assert found == pytest.approx({"exact": 0.25, "pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0, "flexible": 0.5})
    assert passed("exact", ["a"], lambda _: True) == {"exact": 1.0}


GOOD: dict[str, Callable[[dict[str, Any]], str]] = {
    "keywords:existence": lambda a: f"I say {a['keywords'][0]} and {a['keywords'][1]}.",
    "keywords:frequency": lambda a: " ".join([a["keyword"]] * a["frequency"]) if a["relation"] == "at least" else "x",
    "keywords:forbidden_words": lambda a: "Nothing of that.",
    "keywords:letter_frequency": lambda a: a["letter"] * 12 if a["let_relation"] == "at least" else "no such one",
    "length_constraints:number_words": lambda a: "word " * (a["num_words"] if a["relation"] == "at least" else 3),
    "length_constraints:number_paragraphs": lambda a: "\n***\n".join(["text"] * a["num_paragraphs"]),
    "length_constraints:nth_paragraph_first_word": lambda a: f"First.\n\n{a['first_word'].capitalize()} second.",
    "detectable_content:number_placeholders": lambda a: "[x] " * a["num_placeholders"],
    "detectable_content:postscript": lambda a: f"Text.\n{a['postscript_marker']} more",
    "detectable_format:number_bullet_lists": lambda a: "\n".join(["* point"] * a["num_bullets"]),
    "detectable_format:number_highlighted_sections": lambda a: "*part* " * a["num_highlights"],
    "detectable_format:multiple_sections": lambda a: "\n".join(
        f"{a['section_spliter']} {index + 1}\ntext" for index in range(a["num_sections"])
    ),
    "detectable_format:json_format": lambda a: '{"a": 1}',
    "detectable_format:title": lambda a: "<<a title>>\ntext",
    "combination:two_responses": lambda a: "one\n******\ntwo",
    "startend:end_checker": lambda a: f"Text. {a['end_phrase']}",
    "startend:quotation": lambda a: '"all of it"',
    "change_case:english_capital": lambda a: "THIS IS THE ANSWER THAT YOU WANTED TO READ.",
    "change_case:english_lowercase": lambda a: "this is the answer that you wanted to read.",
    "punctuation:no_comma": lambda a: "No such mark here.",
}
BAD = 'A, very good, "qq" answer and people and people because of time.'
"""Breaks every instruction of the suite."""


def test_every_instruction_can_be_followed_and_broken(loaded: dict[str, Any]) -> None:
    seen = set()
    for doc in loaded["preft_instructions"].eval_docs:
        items = json.loads(doc["instructions"])
        verifiers = instructions.verifiers_of(doc)
        for item, verifier in zip(items, verifiers, strict=True):
            seen.add(item["id"])
            text = GOOD[item["id"]](item["arguments"])
            assert instructions.followed([verifier], text) == [True], (item, text)
            breaking = (
                "word " * 200
                if item["arguments"].get("relation") == "less than" and "num_words" in item["arguments"]
                else BAD
            )
            assert instructions.followed([verifier], breaking) == [False], item
    assert seen == set(GOOD)


def test_prompt_and_instruction_scores(loaded: dict[str, Any]) -> None:
    docs = list(loaded["preft_instructions"].eval_docs)
    (pair,) = [doc for doc in docs if "no commas" in doc["prompt"] and "less than 80 words" in doc["prompt"]]
    assert instructions.score(pair, [["Short and plain."]]) == {
        "prompt_strict": 1.0, "prompt_loose": 1.0, "inst_strict": 1.0, "inst_loose": 1.0,
    }  # fmt: skip
    assert instructions.score(pair, [["Short, and plain."]])["inst_strict"] == 0.5
    assert instructions.score(pair, [["Well, here it is:\nShort and plain."]]) == {
        "prompt_strict": 0.0, "prompt_loose": 1.0, "inst_strict": 0.5, "inst_loose": 1.0,
    }  # fmt: skip
    assert instructions.score(pair, [["Plain.", "Not, plain."]])["pass@2"] == 1.0


def test_the_verifiers_are_the_harness_s_own(loaded: dict[str, Any]) -> None:
    """Strict and loose results against the harness's own scorer of `ifeval`."""
    instructions._registry()
    from lm_eval.tasks.ifeval import utils

    answers = ["Short, plain.", "HERE IT IS:\n* one\n* two\n* three", '"Section 1\nSection 2\nSection 3"', "<<t>>\nx\n"]
    for doc in loaded["preft_instructions"].eval_docs:
        items = json.loads(doc["instructions"])
        theirs = utils.InputExample(
            0, [item["id"] for item in items], doc["prompt"], [item["arguments"] for item in items]
        )
        verifiers = instructions.verifiers_of(doc)
        for answer in answers:
            strict = utils.test_instruction_following_strict(theirs, answer).follow_instruction_list
            loose = utils.test_instruction_following_loose(theirs, answer).follow_instruction_list
            assert instructions.followed(verifiers, answer) == strict
            assert instructions.followed(verifiers, answer, loose=True) == loose


@pytest.mark.parametrize(
    ("asked", "written", "score"),
    # By hand from the formula: 1 - 1/3 at twice the length, 1 - 1/2 at half of it, nothing from 4 times and 1/3 on.
    [(100, 100, 1), (100, 200, 2 / 3), (100, 50, 0.5), (300, 100, 0), (100, 400, 0), (100, 900, 0), (100, 0, 0)],
)
def test_the_score_of_a_length(asked: int, written: int, score: float) -> None:
    assert length.length_score(asked, written) == pytest.approx(score)
    found = length.score({"words": asked}, ["word " * written])
    assert found["length_score"] == pytest.approx(score)
    assert found["words"] == written
    assert found["log_ratio"] == pytest.approx(math.log(max(written, 0.5) / asked))


def test_words_are_counted_as_a_reader_does() -> None:
    assert length.count_words("It's a well-known fact: 3 words, or 42? Ça va.") == 10
    assert length.count_words(" \n--- ... ") == 0


def test_the_lengths_that_are_asked_for(loaded: dict[str, Any]) -> None:
    assert {doc["words"] for doc in loaded["preft_length_long"].eval_docs} == {700, 1500, 3000}
    doc = loaded["preft_length_short"].eval_docs[1]
    assert doc["prompt"].endswith("Write about 100 words.")


def test_code_is_refused_unless_it_is_allowed() -> None:
    manager, names = find_tasks(["preft_humaneval"])
    with pytest.raises(UnsupportedError) as caught:
        load_tasks(manager, names)
    assert "--allow-code-execution" in str(caught.value)
    with pytest.raises(ValueError, match="unsafe"):
        lm_eval.simple_evaluate(DummyLM(), tasks=["preft_humaneval"], task_manager=manager, bootstrap_iters=0)


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    manager, names = find_tasks(["preft_humaneval"])
    return list(load_tasks(manager, names, allow_code_execution=True)["tasks"]["preft_humaneval"].eval_docs)


def _solves(doc: dict[str, Any]) -> bool:
    solution = doc["canonical_solution"]
    block = f"Here it is:\n```python\n{doc['prompt']}{solution}```\nand so on."
    return (
        humaneval.score(doc, [[solution]]) == {"pass@1": 1.0}
        and humaneval.score(doc, [[block]]) == {"pass@1": 1.0}
        and humaneval.score(doc, [["    return None\n"]]) == {"pass@1": 0.0}
    )


def test_solutions_pass_and_others_do_not(problems: list[dict[str, Any]]) -> None:
    assert len(problems) == 164
    assert all(_solves(doc) for doc in problems[:3])
    bodies = [
        [problems[0]["canonical_solution"], "    while True: import os; os.fork()\n", "    raise SystemExit(0)\n"]
    ]
    assert humaneval.score(problems[0], bodies)["pass@1"] == pytest.approx(1 / 3)
    assert humaneval.score(problems[0], [["I cannot."]]) == {"pass@1": 0.0}


@pytest.mark.full
def test_all_canonical_solutions_pass(problems: list[dict[str, Any]]) -> None:
    assert [doc["task_id"] for doc in problems if not _solves(doc)] == []


def test_the_harness_s_own_entry_runs_them(tmp_path: Path) -> None:
    """From Python, by `task_manager`, with a model that knows nothing."""
    found = lm_eval.simple_evaluate(
        DummyLM(), tasks=list(SAFE), task_manager=task_manager(), limit=2, bootstrap_iters=0, log_samples=True
    )
    for name in SAFE:
        assert found["versions"][name] == 1.0
        assert len(found["samples"][name]) == 2
    assert found["results"]["preft_length_short"]["length_score,none"] >= 0
