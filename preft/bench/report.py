"""Everything that is written about rows: entries, remarks, pictures, the page; of one run or of several together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft.bench.page import save_page
from preft.bench.plots import save_plots
from preft.bench.rows import Row, read_rows, write_rows
from preft.bench.runner import COMPLETE, FAILED
from preft.bench.summary import remarks, summarise


@dataclass(frozen=True)
class Report:
    """What rows say.

    Attributes:
        entries: See `preft.bench.summary.summarise`.
        notes: What a reader must know first.
        page: The HTML page.
    """

    entries: list[dict[str, Any]]
    notes: list[str]
    page: Path


def write_report(rows: Sequence[Row], status: str, setup: dict[str, Any], out: Path) -> Report:
    """Writes pictures and page of rows.

    Args:
        rows: Of one result.
        status: How the run ended; see `preft.bench.runner.Outcome`.
        setup: Of the run.
        out: Folder.

    Raises:
        FileError: They cannot be written.
    """
    entries = summarise(rows)
    notes = remarks(rows, entries, status)
    save_plots(entries, out)
    return Report(entries, notes, save_page(out, entries, notes, setup))


def join_results(results: Sequence[Path], out: Path) -> Report:
    """One result out of several that have no point in common, such as a sweep whose points need different lengths.

    Raises:
        FileError: One cannot be read, or the new one not be written.
    """
    rows = [row for result in results for row in read_rows(result)]
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out, rows)
    status = FAILED if any(row.get("partial") for row in rows) else COMPLETE
    return write_report(rows, status, rows[0]["setup"], out)
