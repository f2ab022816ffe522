"""Prompts of a file (JSON lines) as token ids, each with its row, which the rewards read."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.data.encode import encode_row
from preft.data.rows import PromptRow
from preft.data.training import DataReport, parse_line, read_lines
from preft.errors import FileError, PreftError, RequestError

SHAPES = '{"prompt": "..." or [{"role": "user", "content": "..."}], ...} or {"messages": [...], ...}'


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        token_ids: As a server would make them of the row.
        text: Its text, special tokens included.
        row: The whole row.
        line: Its line in the file, from 1.
    """

    token_ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]
    line: int


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a file.

    Attributes:
        prompts: At least one.
        report: What became of the rows.
        is_chat: Whether one is a conversation.
    """

    prompts: tuple[Prompt, ...]
    report: DataReport
    is_chat: bool

    def of_step(self, step: int, count: int, seed: int) -> list[Prompt]:
        """The prompts of one step, by step and seed alone: each pass over the file has an order of its own.

        Args:
            step: From 0.
            count: Prompts in a step.
            seed: Of the order.
        """
        size = len(self.prompts)
        orders: dict[int, list[int]] = {}
        chosen = []
        for place in range(step * count, (step + 1) * count):
            epoch = place // size
            if epoch not in orders:
                orders[epoch] = list(range(size))
                random.Random(seed * 1_000_003 + epoch).shuffle(orders[epoch])
            chosen.append(self.prompts[orders[epoch][place % size]])
        return chosen


def load_prompts(path: Path | str, tokenizer: Any, *, max_tokens: int, max_bad_rows: float = 0.0) -> PromptSet:
    """Reads a file of prompts.

    Args:
        path: JSON lines.
        tokenizer: The model's.
        max_tokens: Longest prompt.
        max_bad_rows: Part of the rows that may be refused.

    Raises:
        FileError: The file cannot be read, holds no usable row, or too many rows that are not.
    """
    report = DataReport(str(path), schema="prompt")
    found: list[Prompt] = []
    is_chat = False
    for line, data in read_lines(Path(path), report):
        report.rows += 1
        try:
            row = parse_line(data)
            prompt_row = _prompt_row(row, line)
            tokens = encode_row(prompt_row, tokenizer).prompt_token_ids
            if len(tokens) > max_tokens:
                raise RequestError("the prompt is longer than `data.max_prompt_tokens`", got=f"{len(tokens)} tokens")
        except PreftError as error:
            report.refuse(line, error)
            continue
        is_chat |= prompt_row.messages is not None
        report.tokens += len(tokens)
        found.append(Prompt(tokens, tokenizer.decode(tokens), row, line))
    report.examples = len(found)
    _require_good(report, max_bad_rows)
    return PromptSet(tuple(found), report, is_chat)


def _prompt_row(row: Mapping[str, Any], line: int) -> PromptRow:
    given = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(given) != 1:
        raise RequestError("the row has no single prompt", got=f"keys {sorted(row)}"[:80], accepted=SHAPES)
    if row.get("tools"):
        raise RequestError("the row offers `tools`, which are not rendered", got=repr(row["tools"])[:60])
    value = row[given[0]]
    if given == ["prompt"] and isinstance(value, str) and value:
        return PromptRow(str(line), line, None, prompt=value)
    messages = value if isinstance(value, list) else []
    if not messages or not all(isinstance(message, dict) and _is_message(message) for message in messages):
        raise RequestError(f"`{given[0]}` is not valid", got=repr(value)[:80], accepted=SHAPES)
    if messages[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's, so there is nothing to answer")
    return PromptRow(str(line), line, None, messages=tuple(messages))


def _is_message(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _require_good(report: DataReport, max_bad_rows: float) -> None:
    reasons: Sequence[str] = [
        f"{found.count}x {reason} ({', '.join(found.first[:2])})" for reason, found in report.refused.items()
    ]
    if not report.examples:
        raise FileError(f"`{report.path}` holds no prompt", got="; ".join(reasons) or "no row at all", accepted=SHAPES)
    if report.num_refused > max_bad_rows * report.rows:
        raise FileError(
            f"{report.num_refused} of the {report.rows} rows of `{report.path}` cannot be used",
            got="; ".join(reasons),
            accepted=f"at most {max_bad_rows:.2%} of the rows",
            hint="correct them, or raise `data.max_bad_rows` to leave them out",
        )
