"""Tables and figures for people: units in the header, numbers to the right, readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Sequence[str] = ()) -> Table:
    """A plain table.

    Args:
        headers: Titles; units belong here.
        rows: Cells; None is shown as a dash.
        numeric: Titles of the columns to set to the right.
    """
    made = Table(box=None, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in headers:
        made.add_column(Text(header), justify="right" if header in numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    return made


def fields(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one pair a line."""
    made = Table(box=None, pad_edge=False, show_edge=False, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(Text(name), Text("-" if value is None else str(value)))
    return made


def size(num_bytes: int | float) -> str:
    """Bytes in the unit that reads best, such as `4.6 MB` (powers of ten)."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            break
        amount /= 1000
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def few(values: Sequence[object], *, limit: int = 4) -> str:
    """Some values in short: all of them, or the first ones and how many there are."""
    shown = ", ".join(str(_cell(value)) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown} ... ({len(values)} values)"


def report(document: Mapping[str, Any]) -> list[RenderableType]:
    """Any report: its plain values as fields, then each list of rows as a table under its name."""
    plain: list[tuple[str, object]] = []
    tables: list[RenderableType] = []
    for key, value in document.items():
        title = key.replace("_", " ")
        if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
            tables += ["", Text(title, style="bold"), _rows(value)]
        elif isinstance(value, Mapping):
            plain += [(f"{title} {name}".replace("_", " "), _cell(inner)) for name, inner in value.items()]
        else:
            plain.append((title, _cell(value)))
    return [fields(plain), *tables]


def _rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    headers = list(dict.fromkeys(key for row in rows for key in row))
    numeric = [key for key in headers if all(isinstance(row.get(key, 0), int | float) for row in rows)]
    return table(
        [header.replace("_", " ") for header in headers],
        ([_cell(row.get(header)) for header in headers] for row in rows),
        numeric=[header.replace("_", " ") for header in numeric],
    )


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(_cell(item)) for item in value) or None
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items()) or None
    return value
