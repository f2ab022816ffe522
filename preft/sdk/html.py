"""How results look in a notebook. Text from models and users is escaped; nothing is fetched from outside."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from preft.data.requests import GenerationResult


class Shown(Protocol):
    """What is shown of an answer; see `preft.sdk.results.Completion`."""

    @property
    def result(self) -> GenerationResult:
        """The engine's answer."""

    @property
    def adapter(self) -> str | None:
        """The adapter's name, or None for the base model."""

    @property
    def prompt_pieces(self) -> tuple[str, ...]:
        """Text of each prompt token."""

    @property
    def output_pieces(self) -> tuple[str, ...]:
        """Text of each output token."""

    @property
    def adapted(self) -> tuple[bool, ...]:
        """Whether the adapter acted, for each token."""

    @property
    def num_adapted(self) -> int:
        """How many tokens it acted on."""

    @property
    def positions(self) -> str | None:
        """The position policy, or None."""


class Scored(Protocol):
    """What is shown of a score; see `preft.sdk.results.Score`."""

    @property
    def adapter(self) -> str | None:
        """The adapter's name, or None for the base model."""

    @property
    def context(self) -> str:
        """What stands before."""

    @property
    def continuation(self) -> str:
        """What is scored."""

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of each token of it."""

    @property
    def total(self) -> float:
        """Of all of it."""


_STYLE = """
.preft{font:14px/1.5 system-ui,sans-serif;max-width:60rem;color:inherit}
.preft table{border-collapse:collapse;width:100%;color:inherit}
.preft th,.preft td{text-align:left;vertical-align:top;padding:.35em .7em;border-bottom:1px solid #8885}
.preft th{font-weight:600}
.preft code,.preft .tokens{font:13px/1.9 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.preft .tokens span{border-radius:3px;padding:1px 0;box-shadow:inset 0 -1px #8884}
.preft .on{background:#e8a33d66}
.preft .out{background:#4a8fe333}
.preft .out.on{background:#e0564a66}
.preft .key span{padding:1px .5em;margin-right:.6em}
.preft small{opacity:.75}
.preft .bad{color:#c0392b}
"""


def page(body: str) -> str:
    """A fragment with its own style."""
    return f'<style>{_STYLE}</style><div class="preft">{body}</div>'


def completion(one: Shown) -> str:
    """One answer, token by token."""
    if one.result.error is not None:
        return _failed(one)
    return (
        f"<p><b>{escape(one.adapter or 'base')}</b> <small>{_facts(one)}</small></p>"
        f'<div class="tokens">{_tokens(one)}</div>'
        '<p class="key"><small><span class="on">adapted</span><span>prompt, not adapted</span>'
        '<span class="out">output, on base weights</span>'
        + ('<span class="out on">output, adapted</span>' if any(_output_mask(one)) else "")
        + "</small></p>"
    )


def completions(many: Iterable[Shown]) -> str:
    """Answers side by side: one row each, with the tokens behind a fold."""
    rows = []
    for one in many:
        name = escape(one.adapter or "base")
        if one.result.error is not None:
            rows.append(f"<tr><td>{name}</td><td>{_failed(one)}</td><td></td></tr>")
            continue
        fold = f'<details><summary>{_facts(one)}</summary><div class="tokens">{_tokens(one)}</div></details>'
        answer = f"<code>{escape(one.result.text)}</code>"
        rows.append(f"<tr><td>{name}</td><td>{answer}</td><td><small>{fold}</small></td></tr>")
    return f"<table><tr><th>model</th><th>answer</th><th>tokens</th></tr>{''.join(rows)}</table>"


def scores(many: Iterable[Scored]) -> str:
    """Scores as a table."""
    cells = [
        (one.adapter or "base", shorten(one.context, 60), one.continuation, f"{one.total:.4f}", len(one.logprobs))
        for one in many
    ]
    return table(("model", "context", "continuation", "log-probability", "tokens"), cells)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of plain values."""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{body}</table>"


def escape(text: str) -> str:
    """Text that cannot be read as markup."""
    return html.escape(text, quote=True)


def shorten(text: str, most: int) -> str:
    """Text on one line, its middle left out where it is too long."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    return f"{line[: most // 2 - 1]} … {line[-(most // 2 - 2) :]}"


def _facts(one: Shown) -> str:
    prompt, output = len(one.prompt_pieces), len(one.output_pieces)
    adapted = f"{one.num_adapted} adapted" + (f" ({escape(one.positions)})" if one.positions else "")
    digest = f", digest {one.result.digest[:12]}" if one.result.digest else ""
    return f"{prompt} + {output} tokens, {adapted}{digest}"


def _output_mask(one: Shown) -> Sequence[bool]:
    return one.adapted[len(one.prompt_pieces) :]


def _tokens(one: Shown) -> str:
    spans = []
    for index, (piece, is_on) in enumerate(zip(one.prompt_pieces + one.output_pieces, one.adapted, strict=True)):
        classes = " ".join(name for name, holds in (("out", index >= len(one.prompt_pieces)), ("on", is_on)) if holds)
        title = f"position {index}, {'adapted' if is_on else 'base weights'}"
        shown = escape(piece).replace("\n", "⏎\n") or "∅"
        spans.append(f'<span class="{classes}" title="{title}">{shown}</span>')
    return "".join(spans)


def _failed(one: Shown) -> str:
    error = one.result.error or {}
    parts = [escape(str(error.get("message", "failed")))]
    parts += [f"{key}: {escape(str(error[key]))}" for key in ("got", "accepted", "hint") if error.get(key)]
    return f'<span class="bad">{"<br>".join(parts)}</span>'
