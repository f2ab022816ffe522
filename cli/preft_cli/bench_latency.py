"""What `preft bench latency` does around the library: checks first, then the loads, then the report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from preft.bench.facts import available_memory, read_facts, room_for_adapters
from preft.bench.latency.report import ADAPTER_COLUMNS, COLUMNS, save_report
from preft.bench.latency.results import remarks, summarise
from preft.bench.latency.runner import run_latency
from preft.bench.latency.spec import LatencySpec
from preft.bench.runner import COMPLETE, INTERRUPTED
from preft.bench.spec import require_fitting
from preft.bench.throughput import require_runnable
from preft.errors import UsageError
from preft.models.locate import locate_model
from preft.serve.http.launch import read_key
from preft_cli.bench import column_table
from preft_cli.console import Session
from preft_cli.errors import FAILED, OK
from preft_cli.errors import INTERRUPTED as INTERRUPTED_STATUS


def rate_list(text: str) -> tuple[float, ...]:
    """Reads `0.5,1,2`, or `auto` for none.

    Raises:
        UsageError: It is neither.
    """
    if text == "auto":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", part, re.ASCII) for part in parts):
        raise UsageError("`--rates` is not valid", got=f"`{text}`", accepted="auto, or numbers such as 0.5,1,2")
    return tuple(float(part) for part in parts)


def run_latency_bench(spec: LatencySpec, session: Session, *, api_key_file: Path | None = None, **parts: Any) -> int:
    """Checks, measures, reports.

    Args:
        spec: What is asked.
        session: Where output goes.
        api_key_file: File with the key for a server that asks for one.
        parts: Replacements for `run_latency`'s parts, for tests.

    Returns:
        The exit status.

    Raises:
        PreftError: Something is refused before any load is sent, or the server does not work.
    """
    bench = spec.bench
    require_runnable(bench, adapter_dir="--adapter-dir")
    api_key = read_key(api_key_file) if api_key_file is not None else None
    progress = session.progress()
    folder = locate_model(bench.model, progress=progress)
    with session.diverted():
        facts = read_facts(folder, bench.dtype, bench.targets)
        spec.require_length(facts.max_length)
        if spec.url is None:
            room = room_for_adapters(bench.generated)
            require_fitting(bench, facts, memory_bytes=available_memory(), disk_bytes=room)
        outcome = run_latency(spec, folder, facts, api_key=api_key, progress=progress, **parts)
        entries = summarise(outcome.rows, spec.knee_factor)
        notes = remarks(entries, outcome.status)
        page = save_report(entries, notes, outcome.setup, bench.out)
    if outcome.earlier is not None:
        session.note(f"the rows of an earlier run are now in {outcome.earlier}")
    if session.as_json:
        for row in outcome.rows:
            session.emit(row)
    elif entries:
        session.show(column_table(COLUMNS, entries), "", column_table(ADAPTER_COLUMNS, entries))
    for note in notes:
        (session.warn if note.startswith("PARTIAL") else session.note)(note)
    session.note(f"rows, plots and {page}")
    if outcome.status == INTERRUPTED:
        return INTERRUPTED_STATUS
    return OK if outcome.status == COMPLETE else FAILED
