"""Rows of a prompts file (JSON lines): one request to generate on each line.

A row that cannot be used fails alone: it is yielded as a `RowError` in its place, so that results keep the input's
order. The file is read as a stream; nothing is kept of it but the ids seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.adapters.catalog import require_name
from preft.data.jsonlines import MAX_LINE_BYTES, parse_line, read_lines
from preft.data.requests import GenerationResult
from preft.errors import FileError, PreftError, RequestError

REQUIRED = ("id", "adapter")
PROMPTS = ("prompt", "messages", "prompt_token_ids")
OPTIONAL = ("max_tokens", "boundary")
_SHAPE = (
    '{"id": "1", "adapter": NAME or null, "prompt": "..." | "messages": [...] | "prompt_token_ids": [...]}, '
    "and optionally max_tokens, boundary"
)


@dataclass(frozen=True)
class PromptRow:
    """One row, as written.

    Attributes:
        id: Names the row in its result; a number is read as its text.
        line: Number of its line, from 1.
        adapter: Name of an adapter, or None for base.
        prompt: Text to complete, or None.
        messages: A conversation to answer, as roles and contents, or None.
        prompt_token_ids: Token ids to complete, or None. Exactly one of the three is set.
        max_tokens: Output tokens at most, or None for the default.
        boundary: Leading prompt tokens that may be adapted, or None for all.
    """

    id: str
    line: int
    adapter: str | None
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    boundary: int | None = None


@dataclass(frozen=True)
class RowError:
    """A row that cannot be used.

    Attributes:
        id: The row's id, or `line N` where it cannot be read.
        line: Number of its line, from 1.
        error: Parts of the error, as of `PreftError.to_dict`.
        adapter: What the row names, if that can be read.
    """

    id: str
    line: int
    error: Mapping[str, str]
    adapter: str | None = None

    def to_result(self) -> GenerationResult:
        """The failed result that stands in the row's place."""
        return GenerationResult(self.id, self.adapter, None, (), 0, error=self.error)


def read_rows(file: Path | str) -> Iterator[PromptRow | RowError]:
    """Reads a prompts file, line by line; blank lines are passed over.

    Args:
        file: JSON lines in UTF-8, with or without a byte-order mark, lines ended by LF or CRLF.

    Yields:
        For each row that is not blank, what it says or why it cannot be used.

    Raises:
        FileError: The file cannot be read, or holds no row at all.
    """
    path = Path(file)
    seen: dict[str, int] = {}
    num_rows = 0
    for line, data in read_lines(path, "prompts file", max_line_bytes=MAX_LINE_BYTES):
        num_rows += 1
        yield _read_row(path, line, data, seen)
    if num_rows == 0:
        raise FileError(f"`{path}` holds no row", accepted="one JSON object on each line", hint=_SHAPE)


def _read_row(path: Path, line: int, data: bytes | None, seen: dict[str, int]) -> PromptRow | RowError:
    found: dict[str, Any] = {}
    try:
        found = parse_line(data, max_line_bytes=MAX_LINE_BYTES)
        row = _row(found, line)
        if row.id in seen:
            raise RequestError("The id is taken", got=f"`{row.id}`, which line {seen[row.id]} has", accepted="one row")
        seen[row.id] = line
        return row
    except PreftError as error:
        name, adapter = found.get("id"), found.get("adapter")
        known = str(name) if isinstance(name, str | int) and not isinstance(name, bool) and name != "" else None
        located = RequestError(
            f"Line {line} of `{path}`: {error.what}", got=error.got, accepted=error.accepted, hint=error.hint
        )
        return RowError(known or f"line {line}", line, located.to_dict(), adapter if isinstance(adapter, str) else None)


def _row(found: Mapping[str, Any], line: int) -> PromptRow:
    known = {*REQUIRED, *PROMPTS, *OPTIONAL}
    unknown = [key for key in found if key not in known]
    if unknown:
        raise RequestError("unknown key", got=", ".join(f"`{key}`" for key in unknown), accepted=_SHAPE)
    missing = [key for key in REQUIRED if key not in found]
    if missing:
        hint = 'write `"adapter": null` for the base model' if "adapter" in missing else None
        raise RequestError(
            f"missing {' and '.join(f'`{key}`' for key in missing)}", got=f"keys {sorted(found)}", hint=hint
        )
    given = [key for key in PROMPTS if found.get(key) is not None]
    if len(given) != 1:
        raise RequestError(
            "not exactly one prompt",
            got=", ".join(f"`{key}`" for key in given) or "none",
            accepted="one of " + ", ".join(f"`{key}`" for key in PROMPTS),
        )
    adapter = found["adapter"]
    if adapter is not None:
        require_name(adapter)
    boundary = _integer(found, "boundary", least=0)
    if adapter is None and boundary:
        raise RequestError(
            "a boundary was given without an adapter",
            got=str(boundary),
            accepted="nothing, or 0",
            hint="name an adapter, or leave `boundary` out",
        )
    return PromptRow(
        id=_id(found["id"]),
        line=line,
        adapter=adapter,
        prompt=_prompt(found),
        messages=_messages(found),
        prompt_token_ids=_token_ids(found),
        max_tokens=_integer(found, "max_tokens", least=1),
        boundary=boundary,
    )


def _id(value: object) -> str:
    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        return str(value)
    raise RequestError("`id` is not valid", got=repr(value)[:80], accepted="a text that is not empty, or a number")


def _integer(found: Mapping[str, Any], key: str, *, least: int) -> int | None:
    value = found.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return value
    raise RequestError(f"`{key}` is not valid", got=repr(value)[:80], accepted=f"an integer of at least {least}")


def _prompt(found: Mapping[str, Any]) -> str | None:
    value = found.get("prompt")
    if value is None or (isinstance(value, str) and value):
        return value
    raise RequestError("`prompt` is not valid", got=repr(value)[:80], accepted="a text that is not empty")


def _messages(found: Mapping[str, Any]) -> tuple[Mapping[str, str], ...] | None:
    value = found.get("messages")
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise RequestError("`messages` is not valid", got=repr(value)[:80], accepted="a list that is not empty")
    for index, message in enumerate(value):
        keys = sorted(message) if isinstance(message, dict) else None
        if keys != ["content", "role"] or not all(isinstance(part, str) for part in message.values()):
            raise RequestError(
                f"message {index} is not valid",
                got=repr(message)[:80],
                accepted='{"role": "...", "content": "..."} with texts',
            )
    if value[-1]["role"] == "assistant":
        raise RequestError(
            "the last message is the assistant's, so there is nothing to answer",
            hint="end with a user's message, or give the rendered text as `prompt`",
        )
    return tuple(value)


def _token_ids(found: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = found.get("prompt_token_ids")
    if value is None:
        return None
    valid = isinstance(value, list) and value
    if not valid or not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
        raise RequestError(
            "`prompt_token_ids` is not valid", got=repr(value)[:80], accepted="a list of token ids that is not empty"
        )
    return tuple(value)
