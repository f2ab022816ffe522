"""Rows to requests: the prompt is exactly what the tokenizer and the chat template make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft.data.encode import GenerationDefaults, encode_row, encode_rows, load_tokenizer
from preft.data.requests import GenerationRequest
from preft.data.rows import PromptRow, RowError
from preft.errors import FileError, RequestError, UsageError
from tests.helpers.tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return load_tokenizer(folder)


def chat(*turns: tuple[str, str], **more: Any) -> PromptRow:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return PromptRow("x", 1, "a", messages=messages, **more)


def test_a_text_is_tokenised_as_it_stands(tokenizer: Any) -> None:
    request = encode_row(PromptRow("x", 1, None, prompt="Hello bee"), tokenizer)
    assert request == GenerationRequest("x", tuple(tokenizer("Hello bee").input_ids))


def test_a_conversation_is_rendered_with_the_opening_of_the_answer(tokenizer: Any) -> None:
    row = chat(("user", "hi"), ("assistant", "arr"), ("user", "bee"), boundary=4)
    tokens = encode_row(row, tokenizer).prompt_token_ids
    want = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\narr<|im_end|>\n"
        "<|im_start|>user\nbee<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokens) == want
    assert tokens.count(1) == 4


def test_special_tokens_are_not_added_twice(tmp_path: Path) -> None:
    """A template that writes the start token, with a tokenizer that adds one to plain text."""
    from tokenizers import processors

    write_tiny_tokenizer(tmp_path, chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    adding = load_tokenizer(tmp_path)
    adding._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert encode_row(PromptRow("x", 1, None, prompt="hi"), adding).prompt_token_ids.count(1) == 1
    assert encode_row(chat(("user", "hi")), adding).prompt_token_ids.count(1) == 1


def test_defaults_and_what_a_row_says(tokenizer: Any) -> None:
    defaults = GenerationDefaults(max_tokens=5, temperature=0.5, seed=3, ignore_eos=True, num_logprobs=0)
    plain = encode_row(PromptRow("x", 1, None, prompt="hi"), tokenizer, defaults)
    assert (plain.max_tokens, plain.temperature, plain.seed, plain.ignore_eos, plain.num_logprobs) == (
        5, 0.5, 3, True, 0,
    )  # fmt: skip
    assert encode_row(PromptRow("x", 1, None, prompt="hi", max_tokens=9), tokenizer, defaults).max_tokens == 9
    for wrong in ({"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}):
        with pytest.raises(UsageError):
            GenerationDefaults(**wrong)


def test_what_cannot_be_encoded(tokenizer: Any, tmp_path: Path) -> None:
    ids = PromptRow("x", 1, "a", prompt_token_ids=(1, 600))
    assert encode_row(ids, None).prompt_token_ids == (1, 600)
    with pytest.raises(RequestError, match="does not have") as caught:
        encode_row(ids, None, vocab_size=512)
    assert (caught.value.got, caught.value.accepted) == ("600", "0 to 511")
    with pytest.raises(RequestError, match="no tokenizer"):
        encode_row(PromptRow("x", 1, None, prompt="hi"), None)
    with pytest.raises(UsageError, match="boundary of a request"):
        encode_row(PromptRow("x", 1, "a", prompt_token_ids=(1, 2), boundary=3), tokenizer)
    write_tiny_tokenizer(tmp_path / "none", chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        encode_row(chat(("user", "hi")), load_tokenizer(tmp_path / "none"))
    strict = "{{ raise_exception('no system turns') if messages[0].role == 'system' }}"
    write_tiny_tokenizer(tmp_path / "strict", chat_template=strict)
    with pytest.raises(RequestError, match="refuses the conversation") as caught:
        encode_row(chat(("system", "s"), ("user", "hi")), load_tokenizer(tmp_path / "strict"))
    assert "no system turns" in str(caught.value)
    with pytest.raises(RequestError, match="prompt is empty"):
        encode_row(chat(("user", "hi")), load_tokenizer(tmp_path / "strict"))


def test_rows_that_fail_keep_their_place(tokenizer: Any) -> None:
    broken = RowError("line 1", 1, {"message": "m"})
    rows = [broken, PromptRow("b", 2, None, prompt="hi"), PromptRow("c", 3, "a", prompt="hi", boundary=99)]
    first, second, third = encode_rows(rows, tokenizer)
    assert first is broken
    assert isinstance(second, GenerationRequest)
    assert isinstance(third, RowError)
    assert (third.id, third.line, third.adapter) == ("c", 3, "a")
    assert "99" in third.error["got"]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FileError, match="cannot be read"):
        load_tokenizer(tmp_path)
