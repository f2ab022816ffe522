"""Training files: what is used, counted and refused, with line numbers."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from preft.data import jsonlines
from preft.data.chat import ChatEncoder
from preft.data.encode import load_tokenizer
from preft.data.examples import Limits
from preft.data.training import DataReport, ExampleSet, load_examples
from preft.errors import FileError, RequestError, UnsupportedError
from tests.helpers.tokenizer import write_tiny_tokenizer

GOOD = {"prompt": "one two", "completion": "three"}
CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]}


@pytest.fixture
def encoder(tmp_path: Path) -> ChatEncoder:
    write_tiny_tokenizer(tmp_path)
    return ChatEncoder(load_tokenizer(tmp_path))


def _load(tmp_path: Path, encoder: ChatEncoder, content: bytes, **settings: Any) -> tuple[ExampleSet, DataReport]:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    limits = settings.pop("limits", Limits(100))
    return load_examples(file, encoder, limits, **settings)


def _lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_a_mark_crlf_and_blank_lines_are_fine(tmp_path: Path, encoder: ChatEncoder) -> None:
    content = b"\xef\xbb\xbf" + _lines(GOOD, GOOD).replace(b"\n", b"\r\n") + b"\r\n\n"
    found, report = _load(tmp_path, encoder, content)
    assert (len(found), report.rows, report.schema) == (2, 2, "prompt/completion")
    assert [example.id for example in found] == ["line 1", "line 2"]
    assert report.sha256 == hashlib.sha256(content).hexdigest()
    assert found[-1].completion_ids == found[0].completion_ids
    assert [found.num_tokens_of(n) for n in range(2)] == [example.num_tokens for example in found[:]]


def test_turns_are_examples_and_named(tmp_path: Path, encoder: ChatEncoder) -> None:
    row = {"messages": CHAT["messages"] * 2, "source": "extra columns are left alone"}
    found, report = _load(tmp_path, encoder, _lines(row))
    assert [example.id for example in found] == ["line 1, turn 1", "line 1, turn 2"]
    assert (report.examples, report.tokens) == (2, sum(example.num_tokens for example in found))
    last, _ = _load(tmp_path, encoder, _lines(row), turns="last")
    assert last[0].prompt_ids == found[1].prompt_ids
    split = {"prompt": row["messages"][:3], "completion": row["messages"][3:]}
    apart, report = _load(tmp_path, encoder, _lines(split))
    assert (len(apart), apart[0].prompt_ids) == (1, found[1].prompt_ids)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "the row has a `prompt` and no `completion`"),
        ({"text": "a"}, "the row is no example"),
        ({**GOOD, **CHAT}, "the row is no example"),
        (CHAT, "the row has another schema than the file"),
        ({"prompt": "a", "completion": "  "}, "the `completion` is empty"),
        ({"prompt": "", "completion": "a"}, "the `prompt` is empty"),
        ({"prompt": 3, "completion": "a"}, "the `prompt` is not a text"),
        ({"prompt": "a", "completion": "b" * 200}, "the completion does not fit into `max_tokens`"),
        ([1], "the line is not a JSON object"),
        ({**GOOD, "tools": [{"name": "f"}]}, "the row offers `tools`, which are not rendered"),
    ],
)
def test_a_bad_row_is_counted_by_reason(tmp_path: Path, encoder: ChatEncoder, row: Any, reason: str) -> None:
    found, report = _load(tmp_path, encoder, _lines(GOOD, row, GOOD), max_bad_rows=0.5)
    assert len(found) == 2
    assert list(report.refused) == [reason]
    assert report.refused[reason].first[0].startswith("line 2")
    with pytest.raises(FileError, match=r"1 of the 3 rows .* cannot be used") as caught:
        _load(tmp_path, encoder, _lines(GOOD, row, GOOD), max_bad_rows=0.3)
    assert reason in str(caught.value.got)
    assert "data.max_bad_rows" in str(caught.value.hint)


def test_a_broken_line_far_down_is_named(tmp_path: Path, encoder: ChatEncoder) -> None:
    content = _lines(*[GOOD] * 3000) + b'{"prompt": "a", \n' + _lines(GOOD)
    _, report = _load(tmp_path, encoder, content, max_bad_rows=0.01)
    assert report.refused["the line is not a JSON object"].first == [
        "line 3001: column 16: Expecting property name enclosed in double quotes"
    ]


def test_long_prompts_lose_their_first_tokens_and_are_counted(tmp_path: Path, encoder: ChatEncoder) -> None:
    row = {"prompt": "0123456789" * 4, "completion": "xyz"}
    found, report = _load(tmp_path, encoder, _lines(row, GOOD), limits=Limits(20))
    assert (report.prompts_cut, report.completions_cut) == (1, 0)
    assert found[0].num_tokens == 20
    whole, _ = _load(tmp_path, encoder, _lines(row))
    assert found[0].prompt_ids == whole[0].prompt_ids[-found[0].boundary :]
    assert found[0].completion_ids == whole[0].completion_ids
    row = {"prompt": "01", "completion": "9876543210" * 4}
    found, report = _load(tmp_path, encoder, _lines(row), limits=Limits(20, cut_completions=True))
    assert (found[0].boundary, len(found[0].completion_ids), report.completions_cut) == (1, 19, 1)


def test_no_example_at_all_is_refused(tmp_path: Path, encoder: ChatEncoder) -> None:
    for content in (b"", b"\n\n", _lines({"a": 1})):
        with pytest.raises(FileError, match="holds no example"):
            _load(tmp_path, encoder, content, max_bad_rows=1.0)
    with pytest.raises(FileError, match="cannot be read"):
        load_examples(tmp_path / "missing.jsonl", encoder, Limits(10))


def test_conversations_need_a_template(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(UnsupportedError, match="no chat template"):
        _load(tmp_path, ChatEncoder(load_tokenizer(tmp_path)), _lines(CHAT))


def test_a_broken_line_beyond_a_million_is_named(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_bytes(b"{}\n" * 1_000_002 + b"{broken\n")
    *_, (number, data) = jsonlines.read_lines(file, "training file")
    assert (number, data) == (1_000_003, b"{broken")
    with pytest.raises(RequestError, match="not valid JSON") as caught:
        jsonlines.parse_line(data)
    assert "column 2" in str(caught.value.got)


def test_reading_takes_the_memory_of_a_line_and_not_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "big.jsonl"
    with file.open("wb") as stream:
        for _ in range(400):
            stream.write(b"{" + b" " * 100_000 + b"}\n")
    assert file.stat().st_size > 40_000_000
    tracemalloc.start()
    count = sum(1 for _ in jsonlines.read_lines(file, "training file"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 400
    assert peak < 1_000_000
