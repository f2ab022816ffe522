"""Reading a prompts file: every fault named with its line, and failing alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft.data import rows
from preft.data.rows import PromptRow, RowError, read_rows
from preft.errors import FileError


def write(folder: Path, *lines: object, end: str = "\n") -> Path:
    file = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_bytes("".join(text + end for text in texts).encode("utf-8", "surrogatepass"))
    return file


def test_every_kind_of_row(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = write(
        tmp_path,
        {"id": "a", "adapter": None, "prompt": "hello"},
        {"id": "b", "adapter": "pirate", "messages": messages, "max_tokens": 1, "boundary": 0},
        {"id": 3, "adapter": "pirate", "prompt_token_ids": [0, 5], "boundary": None},
        {"id": "d", "adapter": None, "prompt": "x", "boundary": 0},
    )
    assert list(read_rows(file)) == [
        PromptRow("a", 1, None, prompt="hello"),
        PromptRow("b", 2, "pirate", messages=tuple(messages), max_tokens=1, boundary=0),
        PromptRow("3", 3, "pirate", prompt_token_ids=(0, 5)),
        PromptRow("d", 4, None, prompt="x", boundary=0),
    ]


def test_byte_order_mark_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    good = '{"id": "%s", "adapter": null, "prompt": "é"}'
    file = tmp_path / "p.jsonl"
    text = f"\ufeff{good % 'a'}\r\n\r\n   \r\n{good % 'b'}\n{good % 'c'}"
    file.write_bytes(text.encode())
    assert [(row.id, row.line) for row in read_rows(file)] == [("a", 1), ("b", 4), ("c", 5)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"id": "x", "adapter": null, "prompt": "unclosed}', "is not valid JSON"),
        ('{"id": "x", "adapter": null, "prompt": "a"} trailing', "is not valid JSON"),
        ('{"id": "x", "id": "y", "adapter": null, "prompt": "a"}', "`id` twice"),
        ("[1, 2]", "does not hold a JSON object"),
        ("null", "does not hold a JSON object"),
        ('{"id": "x", "adapter": null, "prompt_token_ids": [NaN]}', "is not valid JSON"),
        ({"id": "x", "adapter": None, "prompt": "a", "temprature": 1}, "`temprature`"),
        ({"id": "x", "prompt": "a"}, "missing `adapter`"),
        ({"adapter": None, "prompt": "a"}, "missing `id`"),
        ({"id": "", "adapter": None, "prompt": "a"}, "`id` is not valid"),
        ({"id": True, "adapter": None, "prompt": "a"}, "`id` is not valid"),
        ({"id": "x", "adapter": None}, "not exactly one prompt"),
        ({"id": "x", "adapter": None, "prompt": "a", "prompt_token_ids": [1]}, "not exactly one prompt"),
        ({"id": "x", "adapter": "../etc", "prompt": "a"}, "adapter name is not valid"),
        ({"id": "x", "adapter": 3, "prompt": "a"}, "adapter name is not valid"),
        ({"id": "x", "adapter": None, "prompt": ""}, "`prompt` is not valid"),
        ({"id": "x", "adapter": None, "prompt": 5}, "`prompt` is not valid"),
        ({"id": "x", "adapter": None, "prompt_token_ids": []}, "`prompt_token_ids` is not valid"),
        ({"id": "x", "adapter": None, "prompt_token_ids": [1, -1]}, "`prompt_token_ids` is not valid"),
        ({"id": "x", "adapter": None, "prompt_token_ids": [1.0]}, "`prompt_token_ids` is not valid"),
        ({"id": "x", "adapter": None, "messages": []}, "`messages` is not valid"),
        ({"id": "x", "adapter": None, "messages": [{"role": "user"}]}, "message 0 is not valid"),
        ({"id": "x", "adapter": None, "messages": [{"role": "user", "content": [1]}]}, "message 0 is not valid"),
        ({"id": "x", "adapter": None, "messages": [{"role": "assistant", "content": "a"}]}, "nothing to answer"),
        ({"id": "x", "adapter": None, "prompt": "a", "max_tokens": 0}, "`max_tokens` is not valid"),
        ({"id": "x", "adapter": None, "prompt": "a", "max_tokens": "3"}, "`max_tokens` is not valid"),
        ({"id": "x", "adapter": "a", "prompt": "a", "boundary": -1}, "`boundary` is not valid"),
        ({"id": "x", "adapter": "a", "prompt": "a", "boundary": "3"}, "`boundary` is not valid"),
        ({"id": "x", "adapter": "a", "prompt": "a", "boundary": 2.5}, "`boundary` is not valid"),
        ({"id": "x", "adapter": None, "prompt": "a", "boundary": 1}, "without an adapter"),
    ],
)
def test_a_bad_row_fails_alone_and_is_named(tmp_path: Path, row: object, message: str) -> None:
    good: dict[str, Any] = {"adapter": None, "prompt": "a"}
    file = write(tmp_path, {"id": "first", **good}, "", row, {"id": "last", **good})

    first, bad, last = read_rows(file)

    assert (first.id, last.id) == ("first", "last")
    assert isinstance(bad, RowError)
    assert bad.line == 3
    text = " ".join(bad.error.values())
    assert text.startswith("RequestError Line 3 of")
    assert message in text
    assert bad.to_result().to_dict()["error"] == dict(bad.error)


def test_a_broken_line_gives_its_column(tmp_path: Path) -> None:
    (bad,) = read_rows(write(tmp_path, '{"id": "x", oops}'))
    assert isinstance(bad, RowError)
    assert bad.id == "line 1"
    assert bad.error["got"].startswith("column 13:")


def test_bytes_that_are_not_utf8_fail_alone(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"id": "x", "adapter": null, "prompt": "\xff"}\n{"id": "y", "adapter": null, "prompt": "a"}\n')
    bad, good = read_rows(file)
    assert isinstance(bad, RowError)
    assert "is not UTF-8" in bad.error["message"]
    assert good.id == "y"


def test_a_second_row_of_the_same_id_is_refused(tmp_path: Path) -> None:
    row = {"id": "7", "adapter": None, "prompt": "a"}
    first, second, third = read_rows(write(tmp_path, row, {**row, "id": 7}, {**row, "id": "8"}))
    assert isinstance(first, PromptRow)
    assert isinstance(second, RowError)
    assert "line 1 has" in second.error["got"]
    assert third.id == "8"


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 60)
    good = {"id": "b", "adapter": None, "prompt": "a"}
    first, second = read_rows(write(tmp_path, {"id": "a", "adapter": None, "prompt": "a" * 500}, good))
    assert isinstance(first, RowError)
    assert "too long" in first.error["message"]
    assert second.id == "b"


def test_files_without_rows_or_that_cannot_be_read(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    for file, message in ((empty, "holds no row"), (tmp_path, "cannot be read"), (tmp_path / "no", "cannot be read")):
        with pytest.raises(FileError, match=message):
            list(read_rows(file))


def test_rows_are_read_as_a_stream(tmp_path: Path) -> None:
    """The first rows are there before a later fault of the file is met."""
    file = write(tmp_path, *[{"id": str(index), "adapter": None, "prompt": "a"} for index in range(2000)])
    stream = read_rows(file)
    assert next(stream).id == "0"
    file.write_text("")
    assert next(stream).id == "1"
    stream.close()
