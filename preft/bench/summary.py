"""What the rows say: medians, spreads, and ratios that come with their interval."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from preft.bench.process import TIME_LIMIT
from preft.bench.rows import RATIOS, Row, point_of
from preft.bench.spec import ARMS
from preft.bench.stats import Interval, extent, ratio_interval

_ORDER = ("base-compiled", "base", "base-preft-compiled", "base-preft", *ARMS)
BUSY_CORES = 0.25
"""Cores in use by other processes above which a run is called noisy."""


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry an arm and point, over its repeats."""
    groups: _Groups = {}
    for row in rows:
        groups.setdefault((point_of(row), row["arm"]), []).append(row)
    entries = [_entry(members, groups) for members in groups.values()]
    # Arms take turns, so the rows' own order says nothing.
    points = list(dict.fromkeys(point_of(row) for row in rows))
    return sorted(
        entries,
        key=lambda entry: (points.index(point_of(entry)), _ORDER.index(entry["kind"]), entry["arm"]),
    )


_Groups = dict[tuple[tuple[int, int | str], str], list[Row]]


def _entry(members: Sequence[Row], groups: _Groups) -> dict[str, Any]:
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
        "requests_per_s": _median([row.get("requests_per_s") for row in done]),
        "requests": first["requests"],
        "input_len": first["input_len"],
        "output_len": first["output_len"],
        "shared": bool(first.get("shared")),
        "joules_per_output_token": _median([(row.get("energy") or {}).get("joules_per_output_token") for row in done]),
        "peak_gpu_bytes": max((row.get("peak_gpu_bytes") or 0 for row in done), default=0) or None,
        "peak_rss_bytes": max((row.get("peak_rss_bytes") or 0 for row in done), default=0) or None,
        "other_busy_cores": max((row.get("other_busy_cores") or 0 for row in done), default=0),
        "eager": (first.get("engine") or {}).get("eager"),
        "error": next((row["error"] for row in members if row["error"] is not None), None),
    }
    for metric in ("ttft_s", "tpot_s", "itl_s"):
        for share in ("p50", "p95", "p99"):
            entry[f"{metric}_{share}"] = _median([(row.get(metric) or {}).get(share) for row in done])
    for phase in ("", "prefill_", "decode_"):
        shares = [(row.get("adapter_kernels") or {}).get(f"{phase}share") for row in done]
        entry[f"adapter_{phase}share"] = _median(shares)
    entry["fairness"] = _fairness(done)
    for key, kind in RATIOS.items():
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
    for entry in entries:
        if entry["error"] is not None:
            verb = "was not measured" if entry["error"].get("type") == TIME_LIMIT else "failed"
            place = f"at {entry['adapters']} adapters of rank {entry['lora_rank']}"
            found.append(f"the arm {entry['arm']} {verb} {place}: {entry['error'].get('message', 'no reason given')}")
    if any(entry["repeats"] == 1 for entry in entries):
        found.append("one repeat gives ratios without an interval; they may be noise")
    if any(entry["shared"] for entry in entries):
        found.append("arms without adapters were measured once for all points with the same requests")
    if len({(entry["requests"], entry["input_len"], entry["output_len"]) for entry in entries}) > 1:
        found.append("points differ in requests or lengths: compare ratios between them, not tokens/s")
    reasons = dict.fromkeys((row.get("energy") or {}).get("reason") for row in rows if row.get("energy"))
    found += [f"no energy: {reason}" for reason in reasons if reason]
    blind = dict.fromkeys((row.get("engine") or {}).get("adapter_kernels_unmeasured") for row in rows)
    found += [f"no time of adapter kernels: {reason}" for reason in blind if reason]
    busy = max((entry["other_busy_cores"] for entry in entries), default=0)
    if busy > BUSY_CORES:
        found.append(f"the machine was busy: other processes used up to {busy:.1f} cores meanwhile")
    modes = {entry["kind"]: entry["eager"] for entry in entries if entry["eager"] is not None}
    if modes.get("base") is False and any(value for kind, value in modes.items() if kind != "base"):
        eager = ", ".join(sorted(kind for kind, value in modes.items() if value))
        found.append(f"base ran compiled, but these arms eager, as the engine decided: {eager}")
    if rows and rows[0]["output_len"] == 1:
        found.append("one output token comes from prefill alone, so nothing is said about decode")
    few = [row["requests"] for row in rows if row["requests"] < row["adapters"]]
    if few:
        found.append(f"only {min(few)} requests a run, so not every adapter was used in each")
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def with_targets(
    entries: Sequence[Mapping[str, Any]], targets: Mapping[tuple[str, int], float]
) -> list[dict[str, Any]]:
    """The entries that have a target, with it and with the seconds of each phase beyond base's.

    Args:
        entries: See `summarise`.
        targets: Least ratio to base, by arm and number of adapters.
    """
    found = []
    for entry in entries:
        target = targets.get((entry["arm"], entry["adapters"]))
        if target is None:
            continue
        place = (entry["adapters"], entry["lora_rank"])
        base = next((e for e in entries if e["arm"] == "base" and (e["adapters"], e["lora_rank"]) == place), None)
        extra = {
            f"extra_{key}": entry[key] - base[key]
            if base and entry[key] is not None and base[key] is not None
            else None
            for key in ("prefill_s", "decode_s")
        }
        found.append({**entry, "target": target, **extra})
    return found
