"""Conversations to examples: the boundary is exact by construction, or the template is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preft.data.chat import ChatEncoder, end_ids, require_conversation
from preft.data.encode import encode_row, load_tokenizer
from preft.data.rows import PromptRow
from preft.errors import RequestError, UnsupportedError, UsageError
from tests.helpers.tokenizer import CHAT_TEMPLATE, EOS_ID, write_tiny_tokenizer

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
WORDS = TEXTS.filter(lambda text: bool(text.strip()))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return load_tokenizer(folder)


def _with_template(folder: Path, template: str | None) -> ChatEncoder:
    write_tiny_tokenizer(folder, chat_template=template)
    return ChatEncoder(load_tokenizer(folder))


def _talk(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


@settings(max_examples=25)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.none() | WORDS)
def test_each_turns_prompt_is_what_serving_renders(
    tokenizer: Any, pairs: list[tuple[str, str]], system: str | None
) -> None:
    messages = _talk(*(text for pair in pairs for text in pair), system=system)
    found = ChatEncoder(tokenizer).encode(require_conversation(messages), turns="each")
    assert len(found) == len(pairs)
    starts = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    for start, (prompt, completion) in zip(starts, found, strict=True):
        row = PromptRow("1", 1, None, messages=tuple(messages[:start]))
        assert encode_row(row, tokenizer).prompt_token_ids == prompt
        assert tokenizer.decode(completion) == messages[start]["content"] + "<|im_end|>"
        assert completion[-1] == EOS_ID


def test_a_token_never_straddles_the_boundary(tmp_path: Path) -> None:
    """A template whose generation prompt ends in a letter that would merge with the answer's first one."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] + ' a' }}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    encoder = _with_template(tmp_path, template)
    tokenizer = load_tokenizer(tmp_path)
    ((prompt, completion),) = encoder.encode(_talk("x", "bc"), turns="each")
    together = tokenizer("x abc", add_special_tokens=False).input_ids
    assert together[: len(prompt)] != list(prompt), "the premise: joined, the texts would merge across the boundary"
    assert tokenizer.decode(prompt) == "x a"
    assert tokenizer.decode(completion[:-1]) == "bc"


def test_last_turn_only(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer)
    messages = _talk("a", "b", "c", "d")
    assert encoder.encode(messages, turns="last") == encoder.encode(messages, turns="each")[1:]


def test_what_follows_the_end_token_is_not_learnt_and_a_missing_end_is_added(tmp_path: Path) -> None:
    encoder = _with_template(tmp_path, "{% for m in messages %}{{ m['content'] + ';' }}{% endfor %}")
    assert encoder.encode(_talk("q", "r"), turns="each")[0][1][-1] == EOS_ID
    tokenizer = load_tokenizer(tmp_path)
    semicolon = tokenizer(";").input_ids[0]
    other = ChatEncoder(tokenizer, end_ids={semicolon})
    assert tokenizer.decode(other.encode(_talk("q", "r"), turns="each")[0][1]) == "r;"
    prompt, completion = encoder.encode_text("ab", "cd")
    assert tokenizer.decode(prompt + completion) == "abcd<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no') }}", "refuses the conversation"),
        (CHAT_TEMPLATE.replace("assistant\\n", "robot\\n"), "prompt is not the beginning of the whole conversation"),
        (
            "{% for m in messages %}{% if not loop.last or m['role'] == 'user' %}{{ m['content'] }}{% else %}"
            "{{ m['content'] | upper }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '?' }}{% endif %}",
            "prompt is not the beginning of the whole conversation",
        ),
    ],
)
def test_a_template_without_an_exact_boundary_is_refused(tmp_path: Path, template: str | None, message: str) -> None:
    encoder = _with_template(tmp_path, template)
    with pytest.raises(UnsupportedError, match=message):
        encoder.require_usable()


def test_the_templates_digest(tokenizer: Any) -> None:
    assert ChatEncoder(tokenizer).template_sha256 == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="no end-of-sequence"):
        ChatEncoder(SimpleNamespace(eos_token_id=None))


@pytest.mark.parametrize(("value", "expected"), [(None, set()), (2, {2}), ([2, 5], {2, 5})])
def test_end_ids(value: object, expected: set[int]) -> None:
    assert end_ids(SimpleNamespace(eos_token_id=value)) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "not a list of messages"),
        ("hello", "not a list of messages"),
        (_talk("a"), "no assistant turn"),
        ([{"role": "assistant", "content": "a"}], "assistant comes first"),
        ([{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}], "assistant comes first"),
        ([*_talk("a", "b", system="s"), {"role": "system", "content": "t"}], "two system turns"),
        ([*_talk("a", "b"), {"role": "system", "content": "t"}], "system turn is not the first"),
        (_talk("a", "  "), "a message is empty"),
        (_talk("", "b"), "a message is empty"),
        ([{"role": "user", "content": None}], "a message has no text"),
        ([{"role": "human", "content": "a"}], "unknown role"),
        ([*_talk("a"), {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]}], "more than text"),
        ([*_talk("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}], "more than text"),
    ],
)
def test_a_conversation_with_nothing_to_learn_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        require_conversation(messages)


def test_keys_that_say_nothing_are_left_alone() -> None:
    messages = [{"role": "user", "content": "a", "id": 3}, {"role": "assistant", "content": "b", "tool_calls": None}]
    assert require_conversation(messages) == (*_talk("a", "b"),)
