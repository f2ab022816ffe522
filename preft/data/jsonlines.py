"""Lines of a JSON-lines file as a stream: bounded memory, tolerant of a byte-order mark and of CRLF."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from preft.adapters.jsonfile import parse_json_object
from preft.errors import FileError, PreftError, RequestError

MAX_LINE_BYTES = 64 << 20
"""Longest line in bytes; a longer one is skipped, and fails alone."""

_BOM = b"\xef\xbb\xbf"


def read_lines(
    path: Path,
    kind: str,
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    on_bytes: Callable[[bytes], object] | None = None,
    hint: str | None = None,
) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines that are not blank, without what surrounds their text; None for one that is too long.

    Args:
        path: JSON lines in UTF-8.
        kind: Names the file in errors, such as `prompts file`.
        max_line_bytes: Longest line.
        on_bytes: Receives every byte of the file, in order.
        hint: Of the error.

    Raises:
        FileError: The file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            number = 0
            while chunk := stream.readline(max_line_bytes + 1):
                number += 1
                data: bytes | None = chunk
                _tell(on_bytes, chunk)
                if len(chunk) > max_line_bytes and not chunk.endswith(b"\n"):
                    data = None
                    while chunk and not chunk.endswith(b"\n"):
                        chunk = stream.readline(max_line_bytes)
                        _tell(on_bytes, chunk)
                if data is not None:
                    data = (data.removeprefix(_BOM) if number == 1 else data).strip()
                if data != b"":
                    yield number, data
    except OSError as error:
        raise FileError(
            f"The {kind} `{path}` cannot be read",
            got=error.strerror or str(error),
            accepted="a file of JSON lines, by its path from the working directory",
            hint=hint,
        ) from None


def parse_line(data: bytes | None, *, max_line_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
    """The object on a line.

    Raises:
        RequestError: There is none; the column is named.
    """
    if data is None:
        raise RequestError("the line is too long", accepted=f"{max_line_bytes} bytes at most")
    try:
        return parse_json_object(data, "the line")
    except PreftError as error:
        # The parser counts lines from the start of what it is given, which is one line.
        got = None if error.got is None else error.got.replace("line 1, ", "")
        what = error.what.replace("`the line`", "the line")
        raise RequestError(what, got=got, accepted=error.accepted, hint=error.hint) from None


def _tell(listener: Callable[[bytes], object] | None, chunk: bytes) -> None:
    if listener is not None:
        listener(chunk)
