"""What the rows say: medians, spreads, and ratios that come with their interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from preft.bench.rows import Row, point_of
from preft.bench.stats import Interval, extent, ratio_interval

BASELINES = (("base", "ratio_to_base"), ("lora", "ratio_to_lora"), ("stock-lora", "ratio_to_stock_lora"))
BUSY_CORES = 0.25
"""Cores in use by other processes above which a run is called noisy."""


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry an arm and point, over its repeats."""
    groups: dict[tuple[tuple[int, int], str], list[Row]] = {}
    for row in rows:
        groups.setdefault((point_of(row), row["arm"]), []).append(row)
    return [_entry(members, groups) for members in groups.values()]


def _entry(members: Sequence[Row], groups: dict[tuple[tuple[int, int], str], list[Row]]) -> dict[str, Any]:
    first = members[0]
    point = point_of(first)
    done = [row for row in members if row["output_tokens_per_s"]]
    entry: dict[str, Any] = {
        "arm": first["arm"],
        "kind": first["kind"],
        "adapters": first["adapters"],
        "rank": first["rank"],
        "lora_rank": point[1],
        "repeats": len(done),
        "failed": len(members) - len(done),
        "output_tokens_per_s": extent([row["output_tokens_per_s"] for row in done]),
        "cold_output_tokens_per_s": _median([(row["cold"] or {}).get("output_tokens_per_s") for row in done]),
        "decode_tokens_per_s": _median([row.get("decode_tokens_per_s") for row in done]),
        "prefill_s": _median([row.get("prefill_s") for row in done]),
        "decode_s": _median([row.get("decode_s") for row in done]),
        "peak_rss_bytes": max((row.get("peak_rss_bytes") or 0 for row in done), default=0) or None,
        "other_busy_cores": max((row.get("other_busy_cores") or 0 for row in done), default=0),
        "eager": (first.get("engine") or {}).get("eager"),
        "error": next((row["error"] for row in members if row["error"] is not None), None),
    }
    for metric in ("ttft_s", "tpot_s", "itl_s"):
        for share in ("p50", "p95", "p99"):
            entry[f"{metric}_{share}"] = _median([(row.get(metric) or {}).get(share) for row in done])
    entry["fairness"] = _fairness(done)
    for kind, key in BASELINES:
        interval = _interval(done, groups.get((point, kind), []))
        entry[key] = interval.to_dict() if interval is not None and kind != first["arm"] else None
    return entry


def _fairness(done: Sequence[Row]) -> dict[str, Any] | None:
    found = [row["fairness"] for row in done if row.get("fairness")]
    if not found:
        return None
    return {
        "jain_index": _median([item["jain_index"] for item in found]),
        **{
            key: {end: _median([item[key][end] for item in found]) for end in ("min", "median", "max")}
            for key in ("ttft_s", "request_tokens_per_s")
        },
    }


def _interval(rows: Sequence[Row], others: Sequence[Row]) -> Interval | None:
    beside = {row["repeat"]: row["output_tokens_per_s"] for row in others if row["output_tokens_per_s"]}
    pairs = [(row["output_tokens_per_s"], beside[row["repeat"]]) for row in rows if row["repeat"] in beside]
    return ratio_interval([upper for upper, _ in pairs], [lower for _, lower in pairs])


def remarks(rows: Sequence[Row], entries: Sequence[dict[str, Any]], status: str) -> list[str]:
    """What a reader must know before believing the numbers."""
    found: list[str] = []
    if status != "complete":
        found.append(
            f"PARTIAL: the run was {'interrupted' if status == 'interrupted' else 'not complete: an arm failed'}"
        )
    found += [
        f"the arm {entry['arm']} failed at {entry['adapters']} adapters of rank {entry['lora_rank']}: "
        f"{entry['error'].get('message', 'no reason given')}"
        for entry in entries
        if entry["error"] is not None
    ]
    if any(entry["repeats"] == 1 for entry in entries):
        found.append("one repeat gives ratios without an interval; they may be noise")
    busy = max((entry["other_busy_cores"] for entry in entries), default=0)
    if busy > BUSY_CORES:
        found.append(f"the machine was busy: other processes used up to {busy:.1f} cores meanwhile")
    modes = {entry["kind"]: entry["eager"] for entry in entries if entry["eager"] is not None}
    if modes.get("base") is False and any(value for kind, value in modes.items() if kind != "base"):
        eager = ", ".join(sorted(kind for kind, value in modes.items() if value))
        found.append(f"base ran compiled, but these arms eager, as the engine decided: {eager}")
    if rows and rows[0]["output_len"] == 1:
        found.append("one output token comes from prefill alone, so nothing is said about decode")
    if rows and rows[0]["requests"] < max(row["adapters"] for row in rows):
        found.append(f"only {rows[0]['requests']} requests a run, so not every adapter was used in each")
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
