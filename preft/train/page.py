"""The page of a run: pictures, settings and data on one self-contained HTML page, without script or request."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preft.errors import FileError
from preft.pictures import Picture

PAGE_NAME = "index.html"

Table = tuple[str, Sequence[Mapping[str, Any]]]
"""A heading, and rows with the same keys."""


def save_page(
    folder: Path,
    title: str,
    pictures: Sequence[Picture],
    *,
    summary: Mapping[str, object],
    tables: Sequence[Table] = (),
    remarks: Sequence[str] = (),
) -> Path:
    """Writes `index.html`.

    Args:
        folder: Where.
        title: Names the run.
        pictures: Such as `preft.train.curves.inline_curves` gives.
        summary: What a reader looks for first, by name.
        tables: Such as the settings and the data.
        remarks: What a reader must know.

    Raises:
        FileError: It cannot be written.
    """
    style = importlib.resources.files("preft_templates").joinpath("pages", "page.css").read_text(encoding="utf-8")
    figures = "".join(f"<figure>{picture.svg}</figure>" for picture in pictures)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{_text(title)}</title><style>{style}</style>'
    )
    parts = [
        f"<h1>{_text(title)}</h1>",
        *(f'<p class="warn">{_text(remark)}</p>' for remark in remarks),
        _table([{"": name, " ": value} for name, value in summary.items()]),
        f'<h2>Curves</h2><div class="curves">{figures}</div>' if figures else '<p class="warn">Nothing was logged.</p>',
        *(f"<h2>{_text(heading)}</h2>{_table(rows)}" for heading, rows in tables if rows),
    ]
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"
    path = folder / PAGE_NAME
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise FileError(f"`{path}` cannot be written", got=error.strerror) from None
    return path


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    titles = list(rows[0]) if rows else []
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    shown = f"<thead><tr>{head}</tr></thead>" if any(title.strip() for title in titles) else ""
    body = "".join("<tr>" + "".join(f"<td>{_text(row[title])}</td>" for title in titles) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{shown}<tbody>{body}</tbody></table></div>'


def _text(value: object) -> str:
    """A value as text; lists and nothing as JSON has them."""
    return html.escape(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))
