"""Rows: one an arm, point and repeat, with the whole set-up inside; how they are made, kept and read."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from preft.bench.job import ArmJob
from preft.bench.process import ArmResult
from preft.errors import FileError

ROWS_NAME = "rows.jsonl"
Row = dict[str, Any]
RATIOS = {
    "ratio_to_base": "base",
    "ratio_to_base_compiled": "base-compiled",
    "ratio_to_lora": "lora",
    "ratio_to_stock_lora": "stock-lora",
}
"""Each ratio's key and the arm that it is to."""


def make_row(job: ArmJob, result: ArmResult, setup: dict[str, Any]) -> Row:
    """One row. Its figures are those of the warm run of median speed; the cold run stands beside them.

    Args:
        job: What the process was told.
        result: What it said.
        setup: Of the whole benchmark.
    """
    warm = [run for run in result.runs if run.get("state") == "warm"]
    cold = next((run for run in result.runs if run.get("state") == "cold"), None)
    done = result.error is None and bool(warm)
    middle = sorted(warm, key=lambda run: run["output_tokens_per_s"])[(len(warm) - 1) // 2] if done else {}
    speeds = [run["output_tokens_per_s"] for run in warm]
    return {
        "arm": job.label,
        "kind": job.arm,
        "repeat": job.repeat,
        "adapters": job.adapters,
        "slots": job.slots,
        "rank": job.rank,
        "lora_rank": job.lora_rank,
        "requests": job.requests,
        "input_len": job.input_len,
        "output_len": job.output_len,
        "mode": job.mode,
        "popularity": job.popularity,
        "output_tokens_per_s": statistics.median(speeds) if done else None,
        **dict.fromkeys(RATIOS),
        **{key: value for key, value in middle.items() if key not in ("state", "output_tokens_per_s")},
        "warm_output_tokens_per_s": speeds,
        "cold": cold,
        **result.end,
        "engine": result.engine,
        "partial": True,
        "shared": False,
        "error": result.error,
        "setup": setup,
    }


def add_ratios(rows: Sequence[Row]) -> None:
    """Fills in each row's ratios to the arms of its own point and repeat; undefined ones stay null."""
    for row in rows:
        for key, kind in RATIOS.items():
            beside = next(
                (
                    other["output_tokens_per_s"]
                    for other in rows
                    if other["arm"] == kind and other["repeat"] == row["repeat"] and point_of(other) == point_of(row)
                ),
                None,
            )
            speed = row["output_tokens_per_s"]
            row[key] = speed / beside if speed and beside else None


def share_row(row: Row, *, adapters: int, lora_rank: int | str) -> Row:
    """The row of an arm without adapters, once more at another point with the same requests, and marked as such."""
    return {**row, "adapters": adapters, "lora_rank": lora_rank, "shared": True}


def point_of(row: Row) -> tuple[int, int | str]:
    """The point of the sweep that a row belongs to: adapters and LoRA rank."""
    return row["adapters"], row["lora_rank"]


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Replaces the rows of a folder as a whole, so that a reader never sees half a line.

    Raises:
        FileError: They cannot be written.
    """
    path = folder / ROWS_NAME
    partial = folder / f".{ROWS_NAME}.partial"
    try:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise FileError(f"`{path}` cannot be written", got=error.strerror) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def keep_earlier(folder: Path) -> Path | None:
    """Moves an earlier run's rows aside and returns where; None if there are none."""
    path = folder / ROWS_NAME
    if not path.exists():
        return None
    number = 1
    while (folder / f"rows.{number}.jsonl").exists():
        number += 1
    kept = folder / f"rows.{number}.jsonl"
    path.rename(kept)
    return kept


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a results folder, or of a file.

    Raises:
        FileError: There are none, or they are not rows of this benchmark.
    """
    file = path / ROWS_NAME if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise FileError(f"`{file}` cannot be read", got=reason, accepted="a folder that `preft bench` wrote") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            point_of(row)
            row["arm"], row["repeat"], row["output_tokens_per_s"], row["kind"]
        except (ValueError, KeyError, TypeError):
            raise FileError(f"Line {number} of `{file}` is not a row of `preft bench`", got=line[:80]) from None
        rows.append(row)
    if not rows:
        raise FileError(f"`{file}` holds no rows")
    return rows
