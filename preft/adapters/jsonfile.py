"""JSON as `preft` reads it: strict, and located. Duplicate keys and non-finite numbers are refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from preft.errors import AdapterError

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_COLON = re.compile(r"\s*:")


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKeyError(key)
        found[key] = value
    return found


def _constant(text: str) -> Any:
    raise ValueError(f"`{text}` is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"`{text[:40]}` is beyond a number's range")
    return value


def parse_json_object(data: bytes, name: str) -> dict[str, Any]:
    """Parses `data` as one JSON object.

    Args:
        data: The bytes of the file.
        name: What to call the file in an error.

    Raises:
        AdapterError: Not UTF-8, not JSON, not an object, or a key occurs twice; the message gives line and column.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AdapterError(f"`{name}` is not UTF-8 text", got=f"byte {error.start}: {error.reason}") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise AdapterError(f"`{name}` is not valid JSON", got=f"{where}: {error.msg}") from None
    except _DuplicateKeyError as error:
        raise AdapterError(
            f"`{name}` holds the key `{error.key}` twice in one object", got=_locate_duplicate(text, error.key)
        ) from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"`{name}` is not valid JSON", got=str(error)) from None
    if _SURROGATE.search(text) and not _is_text(value):
        raise AdapterError(
            f"`{name}` is not valid JSON",
            got="an escape `\\ud800` to `\\udfff` without its other half",
            accepted="pairs of them, or the character itself",
        )
    if not isinstance(value, dict):
        raise AdapterError(f"`{name}` does not hold a JSON object", got=type(value).__name__)
    return value


def _is_text(value: Any) -> bool:
    """Whether every text in a parsed value is one: half of a surrogate pair cannot be printed or tokenised."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _locate_duplicate(text: str, key: str) -> str:
    """Line and column of the first place where an object repeats `key`."""
    seen: list[set[str] | None] = []
    for token in _TOKEN.finditer(text):
        if token[0] in "{[":
            seen.append(set() if token[0] == "{" else None)
        elif token[0] in "}]":
            seen.pop()
        elif seen and (keys := seen[-1]) is not None and _COLON.match(text, token.end()):
            name = json.loads(token[0], strict=False)
            if name == key and name in keys:
                line = text.count("\n", 0, token.start()) + 1
                return f"line {line}, column {token.start() - text.rfind(chr(10), 0, token.start())}"
            keys.add(name)
    return f"key `{key}`"
