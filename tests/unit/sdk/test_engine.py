"""The SDK's engine: what it sends is what was meant, what it shows is what was adapted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from preft.adapters.store import save_adapter
from preft.errors import RequestError, UnknownAdapterError, UsageError
from preft.sdk.engine import Engine
from preft.sdk.results import Completions
from tests.helpers.oracle import all_token, oracle_prompt_logprobs, oracle_two_phase, spec_from_adapter
from tests.helpers.tiny import random_adapter

EXACT = 1e-4
"""Between two float32 runs of one computation in different shapes; the adapters move log-probabilities by over 1e-2."""
NAMES = ("lorap", "ends", "lora")


@pytest.fixture(scope="module")
def made(tiny_llama: Path) -> dict[str, Any]:
    return {
        "lorap": random_adapter(tiny_llama, seed=1),
        "ends": random_adapter(tiny_llama, seed=2, positions="f1+l1", targets=(), blocks=(1,)),
        "lora": random_adapter(tiny_llama, seed=3, positions="all"),
    }


@pytest.fixture(scope="module")
def pristine(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("sdk") / "lorap"
    save_adapter(made["lorap"], folder)
    sources = {"lorap": folder, "ends": made["ends"], "lora": made["lora"]}
    with Engine(tiny_llama, sources, backend="hf", progress=False) as opened:
        yield opened


def test_one_text_gives_one_answer_and_several_several(engine: Engine) -> None:
    one = engine.complete("one two three", max_tokens=4, ignore_eos=True)
    many = engine.complete(["one two three", "four"], "lorap", max_tokens=4, ignore_eos=True)
    assert isinstance(many, Completions)
    assert len(many) == 2
    assert many.texts[0] == many[0].text
    assert one.adapter is None
    assert one.num_adapted == 0
    assert len(one.result.token_ids) == 4


def test_the_answer_is_the_oracles(engine: Engine, pristine: Any, made: dict[str, Any]) -> None:
    prompt = tuple(range(40, 52))
    base = oracle_two_phase(pristine, None, prompt, 8)
    for name in NAMES:
        expected = oracle_two_phase(pristine, spec_from_adapter(made[name]), prompt, 8)
        answer = engine.complete([prompt], name, max_tokens=8, ignore_eos=True)[0]
        assert list(answer.result.token_ids) == list(expected.tokens)
        if name == "lorap":
            assert list(expected.tokens) != list(base.tokens)


def test_what_is_shown_as_adapted_is_what_the_rule_says(engine: Engine) -> None:
    prompt, tokens = tuple(range(40, 50)), 3
    expected = {
        "lorap": [True] * 10 + [False] * 3,
        "ends": [True] + [False] * 8 + [True] + [False] * 3,
        "lora": [True] * 12 + [False],  # the last output token is never computed
    }
    for name, mask in expected.items():
        answer = engine.complete([prompt], name, max_tokens=tokens, ignore_eos=True)[0]
        assert list(answer.adapted) == mask, name
    limited = engine.complete([prompt], "lorap", boundary=4, max_tokens=tokens, ignore_eos=True)[0]
    assert list(limited.adapted) == [True] * 4 + [False] * 9


def test_conversations_and_comparisons(engine: Engine) -> None:
    conversation = [{"role": "user", "content": "one two"}]
    one = engine.chat(conversation, "lorap", max_tokens=2)
    two = engine.chat([conversation, conversation], max_tokens=2)
    assert one.result.prompt_token_ids == two[0].result.prompt_token_ids
    rows = engine.compare(conversation, ["lorap", "ends"], max_tokens=2)
    assert [row.adapter for row in rows] == [None, "lorap", "ends"]
    assert rows[0].result.prompt_token_ids == one.result.prompt_token_ids


def test_scores_leave_the_continuation_unadapted(engine: Engine, pristine: Any, made: dict[str, Any]) -> None:
    context, ends = "one two three four five", [" six seven", " eight"]
    found = engine.score(context, ends, "lorap")
    whole = engine.tokenizer(context + ends[0]).input_ids
    boundary = len(engine.tokenizer(context).input_ids)
    assert 1 < boundary < len(whole)
    spec = spec_from_adapter(made["lorap"])
    expected = oracle_prompt_logprobs(pristine, spec, whole, boundary)[boundary - 1 :]
    wrong = oracle_prompt_logprobs(pristine, all_token(spec), whole, boundary)[boundary - 1 :]
    assert found[0].logprobs == pytest.approx(expected, abs=EXACT)
    assert found[0].total == pytest.approx(sum(expected), abs=EXACT * len(expected))
    assert max(abs(a - b) for a, b in zip(expected, wrong, strict=True)) > 100 * EXACT
    assert len(found.to_pandas()) == 2
    assert found.plot().axes[0].get_xlabel() == "log-probability of the continuation"


def test_adapters_come_and_go(engine: Engine, made: dict[str, Any]) -> None:
    prompt = [tuple(range(40, 50))]
    engine.push("new", made["lorap"])
    first = engine.complete(prompt, "new", max_tokens=4, ignore_eos=True)[0]
    engine.replace("new", made["lora"])
    second = engine.complete(prompt, "new", max_tokens=4, ignore_eos=True)[0]
    assert (first.positions, second.positions) == ("prompt", "all")
    assert first.result.digest == made["lorap"].digest
    assert second.result.digest == made["lora"].digest
    engine.remove("new")
    with pytest.raises(UnknownAdapterError):
        engine.complete(prompt, "new")


def test_markup_in_text_is_escaped(engine: Engine) -> None:
    hostile = '<script>alert(1)</script> & "quotes"'
    answers = engine.complete([hostile, "one"], "lorap", max_tokens=2)
    for shown in (answers[0]._repr_html_(), answers._repr_html_(), engine.score("one", [hostile])._repr_html_()):
        assert "<script" not in shown
        assert not re.search(r'(?:src|href)\s*=\s*"', shown)
    assert answers[0]._repr_html_().count('class="on"') >= len(answers[0].prompt_pieces)


def test_tables(engine: Engine) -> None:
    answers = engine.complete([tuple(range(40, 50))] * 2, "lorap", max_tokens=3, ignore_eos=True)
    frame = answers.to_pandas()
    assert list(frame["num_adapted"]) == [10, 10]
    assert list(frame["adapter"]) == ["lorap", "lorap"]
    assert "10 of 13 tokens adapted" in repr(answers)


def test_bad_calls_are_refused(engine: Engine, tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="prompts are not valid"):
        engine.complete([40, 41, 42])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="There is no such setting"):
        engine.complete("one", max_token=4)
    with pytest.raises(UnknownAdapterError):
        engine.complete("one", "none")
    with pytest.raises(UsageError, match="not equally many"):
        engine.score(["one", "two"], ["three"])
    with pytest.raises(RequestError, match="no tokens"):
        engine.score("one", "")
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.complete([[]])
    with pytest.raises(UsageError, match="The backend is not valid"):
        Engine(tiny_llama, backend="tgi")


def test_a_failed_request_says_why(engine: Engine) -> None:
    too_long = tuple(range(40, 50)) * 500
    failed, fine = engine.complete([too_long, (40, 41)], max_tokens=2)
    with pytest.raises(RequestError, match="does not fit the context"):
        _ = failed.text
    assert "does not fit the context" in failed._repr_html_()
    assert fine.result.error is None
