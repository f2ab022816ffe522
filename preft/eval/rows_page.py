"""The page of `preft check --eval`: each row's two answers side by side, with what differs, in one HTML file."""

from __future__ import annotations

import difflib
import html
import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path

from preft.errors import FileError
from preft.eval.own_rows import ARMS, RowMetric, RowScore, RowsReport

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_SHOWN = 5
_MAX_DIFF_WORDS = 4000
"""Longer texts are shown without marks: comparing them would take minutes."""
_STYLE = """
:root { --gone: #fee2e2; --new: #dcfce7; }
@media (prefers-color-scheme: dark) { :root { --gone: #4c1d1d; --new: #14401f; } }
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 0.75rem 1.5rem; }
.texts h4 { margin: 0.5rem 0 0.2rem; font-size: 0.85rem; color: var(--soft); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.92rem; margin: 0; }
del { background: var(--gone); text-decoration: underline dotted; }
ins { background: var(--new); text-decoration: none; border-bottom: 2px solid; }
article { border-top: 1px solid var(--line); padding: 0.75rem 0 1.25rem; }
article h3 { font-size: 1rem; margin: 0; } article:target h3 { color: var(--warn); }
summary { cursor: pointer; } a { color: inherit; }
"""


def save_rows_page(report: RowsReport, title: str, path: Path) -> Path:
    """Writes the page.

    Args:
        report: What came of the rows.
        title: Names adapter and base.
        path: Of the file.

    Raises:
        FileError: It cannot be written.
    """
    try:
        path.write_text(build_rows_page(report, title), encoding="utf-8")
    except OSError as error:
        raise FileError(f"`{path}` cannot be written", got=error.strerror) from None
    return path


def build_rows_page(report: RowsReport, title: str) -> str:
    """The page as text; no script, no request."""
    style = importlib.resources.files("preft_templates").joinpath("pages", "page.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{_text(title)}</title><style>{style}{_STYLE}</style>'
    )
    same = sum(row.is_same for row in report.rows if not row.errors)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">{len(report.rows)} rows of {_text(report.data.path)}. Both write the same in {same}. '
        "Loss: mean negative log-likelihood of the expected answer, in nats a token; the answer itself is scored "
        "without the adapter unless it acts on every token.</p>",
        f'<p class="warn">{len(report.failed)} rows failed and count for nothing.</p>' if report.failed else "",
        _metrics(report.metrics),
        _extremes(report.rows),
        "<h2>Rows</h2>",
        *(_article(number, row) for number, row in enumerate(report.rows, start=1)),
    ]
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _metrics(metrics: Sequence[RowMetric]) -> str:
    titles = ("metric", *ARMS, "difference", "95 % interval", "p (Holm)")
    rows = [
        (
            metric.metric,
            _number(metric.paired.first),
            _number(metric.paired.second),
            _number(metric.paired.difference, sign=True),
            "none"
            if metric.paired.low is None
            else f"{_number(metric.paired.low, sign=True)} to {_number(metric.paired.high, sign=True)}",
            "none" if metric.adjusted is None else f"{metric.adjusted:.2g}",
        )
        for metric in metrics
    ]
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    verdicts = "".join(f"<li>{metric.metric}: {_text(metric.verdict)}: {_text(metric.reason)}" for metric in metrics)
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"{table}<ul>{verdicts}</ul>"


def _extremes(rows: Sequence[RowScore]) -> str:
    """Links to the rows that the adapter changes most, for better and for worse."""
    numbered = sorted(((row.gain, number) for number, row in enumerate(rows, start=1) if not row.errors), reverse=True)
    better = [item for item in numbered if item[0] > 0][:_SHOWN]
    worse = [item for item in reversed(numbered) if item[0] < 0][:_SHOWN]
    lines = [
        f"<li>{words}: "
        + ", ".join(f'<a href="#row-{number}">row {number}</a> ({-gain:+.3g})' for gain, number in found)
        for words, found in (("Loss falls most", better), ("Loss rises most", worse))
        if found
    ]
    return f"<ul>{''.join(lines)}</ul>"


def _article(number: int, row: RowScore) -> str:
    head = f'<article id="row-{number}"><h3>Row {number} <span class="soft">({_text(row.id)})</span></h3>'
    prompt = (
        f'<details><summary class="soft">Prompt: {_text(_ending(row.prompt))}</summary>'
        f'<p class="text">{_text(row.prompt)}</p></details>'
    )
    if row.errors:
        reasons = "; ".join(f"{arm}: {reason}" for arm, reason in row.errors.items())
        return f'{head}{prompt}<p class="warn">{_text(reasons)}</p></article>'
    first, second = marked(*(row.answers[arm] for arm in ARMS))
    loss = ", ".join(f"{arm} {row.loss[arm]:.4g}" for arm in ARMS)
    notes = [f"loss: {loss} ({-row.gain:+.3g})", *(f"{arm}: exact" for arm in ARMS if row.exact[arm])]
    if row.is_same:
        notes.append("both write the same")
    texts = [*zip(ARMS, (first, second), strict=True), ("expected", _text(row.expected))]
    cells = "".join(f'<div><h4>{name}</h4><p class="text">{text or "(nothing)"}</p></div>' for name, text in texts)
    return f'{head}<p class="soft">{"; ".join(notes)}</p>{prompt}<div class="texts">{cells}</div></article>'


def marked(first: str, second: str) -> tuple[str, str]:
    """Two texts as HTML: what only the first has in `del`, what only the second has in `ins`."""
    one, other = _WORDS.findall(first), _WORDS.findall(second)
    if max(len(one), len(other)) > _MAX_DIFF_WORDS:
        return _text(first), _text(second)
    left, right = [], []
    for kind, start, end, from_, to in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        before, after = _text("".join(one[start:end])), _text("".join(other[from_:to]))
        left.append(before if kind == "equal" or not before else f"<del>{before}</del>")
        right.append(after if kind == "equal" or not after else f"<ins>{after}</ins>")
    return "".join(left), "".join(right)


def _ending(text: str) -> str:
    """The end of a prompt on one line: what is asked stands there, behind system text and templates."""
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"... {line[-86:]}"


def _number(value: float | None, *, sign: bool = False) -> str:
    return "none" if value is None else f"{value:{'+' if sign else ''}.4g}"


def _text(value: object) -> str:
    return html.escape(str(value))
