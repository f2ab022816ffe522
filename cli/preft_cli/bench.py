"""What `preft bench` does around the library: checks first, then the run, then the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preft.bench.compare import Comparison
from preft.bench.page import LATENCY_COLUMNS, SPEED_COLUMNS, shown_columns
from preft.bench.runner import COMPLETE, INTERRUPTED
from preft.bench.spec import BenchSpec
from preft.bench.throughput import measure_throughput
from preft.errors import UsageError
from preft_cli.console import Session
from preft_cli.errors import FAILED, OK
from preft_cli.errors import INTERRUPTED as INTERRUPTED_STATUS
from preft_cli.render import table

if TYPE_CHECKING:
    from preft.bench.runner import Outcome


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """Reads `8` or `1,8,64`.

    Raises:
        UsageError: It is no list of whole numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part, re.ASCII) for part in parts):
        raise UsageError(f"`{flag}` is not valid", got=f"`{text}`", accepted="whole numbers such as `8` or `1,8,64`")
    return tuple(int(part) for part in parts)


def names(text: str) -> tuple[str, ...]:
    """Reads `base,lora`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def rank_lists(text: str) -> tuple[tuple[int, ...], ...]:
    """Reads `16`, `8,32` or `8,8+64`, where `+` joins the ranks that adapters have in turn.

    Raises:
        UsageError: It is none of them.
    """
    parts = [part.strip().split("+") for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", number, re.ASCII) for part in parts for number in part):
        raise UsageError("`--rank` is not valid", got=f"`{text}`", accepted="`16`, `8,32`, or `8+64` for mixed ranks")
    return tuple(tuple(int(number) for number in part) for part in parts)


def folders(flag: str, pairs: Sequence[str]) -> dict[str, Path]:
    """Reads `ARM=DIR`, given any number of times.

    Raises:
        UsageError: One is not of that form, or an arm is named twice.
    """
    found: dict[str, Path] = {}
    for pair in pairs:
        arm, given, folder = pair.partition("=")
        if not given or not folder or arm in found:
            raise UsageError(f"`{flag}` is not valid", got=f"`{pair}`", accepted="ARM=DIR, once an arm")
        found[arm] = Path(folder)
    return found


def run_throughput(spec: BenchSpec, session: Session, **parts: Any) -> int:
    """Checks, measures, reports.

    Args:
        spec: What is asked.
        session: Where output goes.
        parts: Replacements for `run_bench`'s parts, for tests.

    Returns:
        The exit status.

    Raises:
        PreftError: Something is refused before any engine starts.
    """
    progress = session.progress()
    with session.diverted():
        outcome, report = measure_throughput(spec, adapter_dir="--adapter-dir", progress=progress, **parts)
    _report(session, outcome, report.entries, report.notes)
    session.note(f"rows, plots and {report.page}")
    if outcome.status == INTERRUPTED:
        return INTERRUPTED_STATUS
    return OK if outcome.status == COMPLETE else FAILED


def _report(session: Session, outcome: Outcome, entries: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    if outcome.earlier is not None:
        session.note(f"the rows of an earlier run are now in {outcome.earlier}")
    if session.as_json:
        for row in outcome.rows:
            session.emit(row)
    elif entries:
        session.show(column_table(SPEED_COLUMNS, entries), "", column_table(LATENCY_COLUMNS, entries))
    for note in notes:
        session.warn(note)
    for row in outcome.failures:
        session.err.print(f"error: {row['arm']}: {row['error'].get('message')}; its log: {row['error'].get('log')}")


def column_table(columns: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> Any:
    """A table of titles and cells, such as `preft.bench.page.SPEED_COLUMNS`."""
    columns = shown_columns(columns, entries)
    rows = [[cell(entry) for cell in columns.values()] for entry in entries]
    return table(list(columns), rows, numeric=[title for title in columns if title != "arm"])


def show_comparison(session: Session, found: Comparison) -> None:
    """Prints two results side by side."""
    headers = ("arm", "adapters", "LoRA rank", f"{found.metric}: A", "B", "change", "n", "verdict")
    rows = [
        (
            change.arm,
            change.adapters,
            change.rank,
            f"{change.before:.4g}",
            f"{change.after:.4g}",
            f"{change.change:+.1%}",
            f"{change.before_repeats}, {change.after_repeats}",
            _verdict(change.regressed, change.separate, change.change),
        )
        for change in found.changes
    ]
    session.show(table(headers, rows, numeric=headers[1:7]))
    for name, values in (("only in A", found.only_before), ("only in B", found.only_after)):
        if values:
            session.show(f"{name}: {', '.join(values)}")
    if found.differences:
        session.warn(f"the set-ups differ in {'; '.join(found.differences)}")
    if found.partial:
        session.warn("one of the results is partial")


def _verdict(regressed: bool, separate: bool, change: float) -> str:
    if regressed:
        return "SLOWER" + ("" if separate else " (repeats overlap)")
    return "faster" if separate and change > 0 else "ok"
