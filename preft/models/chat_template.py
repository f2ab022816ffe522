"""The identity of a chat template, so that an adapter can say which one it was trained with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from preft.adapters.jsonfile import parse_json_object

TEMPLATE_NAME = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"


def chat_template_sha256(folder: Path) -> str | None:
    """SHA-256 of the chat template that lies in a folder, or None where there is none.

    Raises:
        AdapterError: `tokenizer_config.json` is not valid JSON.
    """
    text = read_chat_template(folder)
    return hashlib.sha256(text.encode()).hexdigest() if text is not None else None


def read_chat_template(folder: Path) -> str | None:
    """The chat template beside a tokenizer: its own file, else the default one in the tokenizer's configuration."""
    own = folder / TEMPLATE_NAME
    if own.is_file():
        return own.read_text(encoding="utf-8")
    config = folder / _TOKENIZER_CONFIG
    if not config.is_file():
        return None
    template = parse_json_object(config.read_bytes(), str(config)).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
