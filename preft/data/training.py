"""Training data (JSON lines, or a data set) to examples: what is used, cut and refused, each counted by reason.

The file is read as a stream, and examples are held as flat arrays of token ids, so that a file of gigabytes needs
memory for its tokens only.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, overload

from preft.data import jsonlines
from preft.data.chat import ChatEncoder, require_conversation
from preft.data.examples import Example, Limits, fit
from preft.data.hub import dataset_rows, parse_dataset_name
from preft.errors import FileError, PreftError, RequestError

SHOWN_LINES = 5
SHAPES = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion": "..."}'

_ROLES = {"human": "user", "gpt": "assistant"}
_TOO_LONG = "the completion does not fit into `max_tokens`"


class ExampleSet(Sequence[Example]):
    """Examples in flat arrays; each is built when it is asked for."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._starts = array("q", [0])
        self._boundaries = array("i")
        self._lines = array("i")
        self._turns = array("i")

    def append(self, example: Example, *, line: int, turn: int) -> None:
        """Adds an example; its id is made anew from line and turn."""
        self._tokens.extend(example.prompt_ids)
        self._tokens.extend(example.completion_ids)
        self._starts.append(len(self._tokens))
        self._boundaries.append(example.boundary)
        self._lines.append(line)
        self._turns.append(turn)

    def num_tokens_of(self, index: int) -> int:
        """Length of one example."""
        return self._starts[index + 1] - self._starts[index]

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples together."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._boundaries)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = self._tokens[self._starts[index] : self._starts[index + 1]]
        boundary = self._boundaries[index]
        name = f"line {self._lines[index]}" + (f", turn {self._turns[index]}" if self._turns[index] else "")
        return Example(tuple(tokens[:boundary]), tuple(tokens[boundary:]), name)


@dataclass
class Refusals:
    """Rows that were refused for one reason.

    Attributes:
        count: How many.
        first: Line number and detail of the first few.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class DataReport:
    """What became of a file's rows.

    Attributes:
        path: The file.
        sha256: Of its bytes.
        schema: `messages` or `prompt/completion`, by the first good row.
        rows: Rows that are not blank.
        examples: Examples made of them.
        tokens: Of all examples.
        prompts_cut: Examples whose prompt lost its first tokens.
        completions_cut: Examples whose completion lost its last tokens.
        refused: Refused rows by reason.
    """

    path: str
    sha256: str = ""
    schema: str | None = None
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    prompts_cut: int = 0
    completions_cut: int = 0
    refused: dict[str, Refusals] = field(default_factory=dict)

    @property
    def num_refused(self) -> int:
        """Rows that were refused."""
        return sum(refusals.count for refusals in self.refused.values())

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        refused = {reason: {"count": found.count, "first": found.first} for reason, found in self.refused.items()}
        names = ("path", "sha256", "schema", "rows", "examples", "tokens", "prompts_cut", "completions_cut")
        return {**{name: getattr(self, name) for name in names}, "refused": refused}

    def refuse(self, line: int, error: PreftError) -> None:
        """Counts a row."""
        found = self.refused.setdefault(error.what, Refusals())
        found.count += 1
        if len(found.first) < SHOWN_LINES:
            found.first.append(f"line {line}" + (f": {error.got}" if error.got else ""))


def load_examples(
    path: Path | str,
    encoder: ChatEncoder,
    limits: Limits,
    *,
    turns: str = "each",
    max_bad_rows: float = 0.0,
    columns: Mapping[str, str] | None = None,
) -> tuple[ExampleSet, DataReport]:
    """Reads training data.

    Args:
        path: JSON lines in UTF-8, with or without a byte-order mark, lines ended by LF or CRLF; or the name of a data
            set (see `preft.data.hub`).
        encoder: Makes tokens of texts.
        limits: How long an example may be.
        turns: Which assistant turns of a conversation become examples; see `preft.config.train.TURNS`.
        max_bad_rows: Part of the rows that may be refused.
        columns: Names that `messages`, `prompt` and `completion` have in the data, where they are others.

    Raises:
        FileError: The data cannot be read, holds no usable row, or too many rows that are not.
        UnsupportedError: It holds conversations, and the chat template cannot be trained with.
    """
    report = DataReport(str(path))
    found = ExampleSet()
    for line, read in _rows(str(path), report):
        report.rows += 1
        try:
            row = _renamed(read(), columns or {})
            schema = _schema(row)
            if report.schema is None and schema == "messages":
                encoder.require_usable()
            if report.schema not in (None, schema):
                raise RequestError("the row has another schema than the file", got=f"`{schema}`, not `{report.schema}`")
            pairs = _pairs(row, schema, encoder, turns)
            report.schema = schema
        except RequestError as error:
            report.refuse(line, error)
            continue
        _add(found, report, pairs, limits, line)
    report.examples, report.tokens = len(found), found.num_tokens
    _require_good(report, max_bad_rows)
    return found, report


def _add(
    found: ExampleSet,
    report: DataReport,
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]],
    limits: Limits,
    line: int,
) -> None:
    """Adds a row's examples; the row counts as refused, once, if one of them does not fit."""
    refused = False
    for number, (prompt, completion) in enumerate(pairs, start=1):
        example = Example(prompt, completion)
        fitted = fit(example, limits)
        if fitted is None:
            if not refused:
                got = f"{len(completion)} tokens, {limits.max_tokens} allowed with the prompt"
                report.refuse(line, RequestError(_TOO_LONG, got=got))
            refused = True
            continue
        report.prompts_cut += fitted.boundary < example.boundary
        report.completions_cut += len(fitted.completion_ids) < len(completion)
        found.append(fitted, line=line, turn=number if len(pairs) > 1 else 0)


def _schema(row: Mapping[str, Any]) -> str:
    has = {key for key in ("messages", "prompt", "completion") if row.get(key) is not None}
    if row.get("tools"):
        raise RequestError("the row offers `tools`, which are not rendered", got=repr(row["tools"])[:60])
    if has == {"messages"}:
        return "messages"
    if has == {"prompt", "completion"}:
        return "prompt/completion"
    if has == {"prompt"}:
        raise RequestError("the row has a `prompt` and no `completion`", got=f"keys {sorted(row)}"[:80])
    raise RequestError("the row is no example", got=f"keys {sorted(row)}"[:80], accepted=SHAPES)


def _pairs(
    row: Mapping[str, Any], schema: str, encoder: ChatEncoder, turns: str
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if schema == "messages":
        return encoder.encode(require_conversation(row["messages"]), turns=turns)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        encoder.require_usable()
        messages = require_conversation([*prompt, *completion], first=len(prompt))
        return encoder.encode(messages, turns=turns, first=len(prompt))
    for name, text in (("prompt", prompt), ("completion", completion)):
        if not isinstance(text, str):
            raise RequestError(f"the `{name}` is not a text", got=repr(text)[:60])
        if not text.strip():
            raise RequestError(f"the `{name}` is empty")
    pair = encoder.encode_text(prompt, completion)
    if not pair[0]:
        raise RequestError("the `prompt` is empty")
    return [pair]


def parse_line(data: bytes | None) -> dict[str, Any]:
    """The object on a line that `read_lines` gave.

    Raises:
        RequestError: It holds none, or is too long; all lines that hold none are counted as one reason.
    """
    try:
        return jsonlines.parse_line(data)
    except RequestError as error:
        if data is None:
            raise
        got = error.got or error.what
        raise RequestError("the line is not a JSON object", got=got[:120]) from None


def read_lines(path: Path, report: DataReport) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines that are not blank; None for one that is too long. The file's digest goes into the report."""
    digest = hashlib.sha256()
    yield from jsonlines.read_lines(path, "training file", on_bytes=digest.update, hint=SHAPES)
    report.sha256 = digest.hexdigest()


def _rows(source: str, report: DataReport) -> Iterator[tuple[int, Callable[[], Mapping[str, Any]]]]:
    """Numbered rows, each to be read where its errors are counted. The data's digest goes into the report."""
    name = parse_dataset_name(source)
    if name is None:
        for number, data in read_lines(Path(source), report):
            yield number, partial(parse_line, data)
        return
    digest = hashlib.sha256()
    for number, row in enumerate(dataset_rows(name), start=1):
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        yield number, partial(dict, row)
    report.sha256 = digest.hexdigest()


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The row with its columns under our names, and turns of `from` and `value` as roles and contents."""
    found = {**row, **{ours: row.get(theirs) for ours, theirs in columns.items()}}
    turns = found.get("messages")
    if isinstance(turns, list) and all(isinstance(turn, dict) and {"from", "value"} <= set(turn) for turn in turns):
        named = [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
        return {**found, "messages": named}
    return found


def _require_good(report: DataReport, max_bad_rows: float) -> None:
    reasons = "; ".join(
        f"{found.count}x {reason} ({', '.join(found.first[:2])})" for reason, found in report.refused.items()
    )
    if not report.examples:
        raise FileError(f"`{report.path}` holds no example", got=reasons or "no row at all", accepted=SHAPES)
    if report.num_refused > max_bad_rows * report.rows:
        raise FileError(
            f"{report.num_refused} of the {report.rows} rows of `{report.path}` cannot be used",
            got=reasons,
            accepted=f"at most {max_bad_rows:.2%} of the rows",
            hint="correct them, or raise `data.max_bad_rows` to leave them out",
        )
