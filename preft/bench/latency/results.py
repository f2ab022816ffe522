"""From the client's answers to rows, and from rows to entries with a knee."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from preft.bench.measure import Trace, fairness
from preft.bench.stats import spread

Row = dict[str, Any]
METRICS = ("ttft_s", "tpot_s", "itl_s", "latency_s")


def measured(load: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one load.

    Args:
        load: What was sent.
        answers: What came back, in its order.
    """
    good = [(asked, got) for asked, got in zip(load, answers, strict=True) if got["error"] is None]
    failed = [got["error"] for got in answers if got["error"] is not None]
    short = [got for asked, got in good if got["output_tokens"] != asked["output_len"]]
    traces = [
        Trace(asked["adapter"], [got["ttft_s"], got["latency_s"]], [1, got["output_tokens"]]) for asked, got in good
    ]
    begun = min((got["sent_s"] for got in answers), default=0.0)
    ended = max((got["sent_s"] + got["latency_s"] for _, got in good), default=begun)
    seconds, tokens = ended - begun, sum(got["output_tokens"] for _, got in good)
    later = [
        (got["latency_s"] - got["ttft_s"]) / (got["output_tokens"] - 1) for _, got in good if got["output_tokens"] > 1
    ]
    return {
        "requests": len(load),
        "failed": len(failed),
        "short": len(short),
        "error": None if not failed else {"type": "RequestError", "message": failed[0]},
        "seconds": seconds,
        "requests_per_s": len(good) / seconds if seconds else None,
        "output_tokens_per_s": tokens / seconds if seconds else None,
        "ttft_s": spread([got["ttft_s"] for _, got in good]),
        "tpot_s": spread(later),
        "itl_s": spread([gap for _, got in good for gap in got["itl_s"]]),
        "latency_s": spread([got["latency_s"] for _, got in good]),
        "fairness": fairness(traces) if traces else None,
    }


def past_knee(rows: Sequence[Row], factor: float) -> bool:
    """Whether the last rate of an arm's rows is beyond the knee."""
    first, last = rows[0]["latency_s"]["p50"], rows[-1]["latency_s"]["p50"]
    return bool(rows[-1]["failed"]) or first is None or last is None or last > factor * first


def summarise(rows: Sequence[Row], factor: float) -> list[dict[str, Any]]:
    """One entry an arm and rate, over its repeats, in the order of rates; each says whether it is beyond the knee."""
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["rate"]), []).append(row)
    arms = list(dict.fromkeys(arm for arm, _ in groups))
    entries: list[dict[str, Any]] = []
    for arm in arms:
        rates = sorted((rate for name, rate in groups if name == arm), key=lambda rate: rate or 0.0)
        own = [_entry(groups[arm, rate]) for rate in rates]
        first, beyond = own[0]["latency_s_p50"], False
        for entry in own:
            now = entry["latency_s_p50"]
            beyond = beyond or bool(entry["failed"]) or first is None or now is None or now > factor * first
            entry["past_knee"] = beyond
        entries += own
    return entries


def knees(entries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """By arm, the highest rate before the knee, or None where even the first is beyond it or there is no rate."""
    found: dict[str, float | None] = {}
    for entry in entries:
        found.setdefault(entry["arm"], None)
        if not entry["past_knee"]:
            found[entry["arm"]] = entry["rate"]
    return found


def remarks(entries: Sequence[Mapping[str, Any]], status: str) -> list[str]:
    """What a reader must know before believing the numbers."""
    found: list[str] = []
    if status != "complete":
        why = "was interrupted" if status == "interrupted" else "is not complete: requests failed"
        found.append(f"PARTIAL: the run {why}")
    for entry in entries:
        if entry["failed"]:
            found.append(f"{entry['failed']} requests of {entry['arm']} failed at {_rate(entry)}: {entry['error']}")
        if entry["short"]:
            found.append(f"{entry['short']} answers of {entry['arm']} were shorter than asked at {_rate(entry)}")
    for arm, knee in knees(entries).items():
        own = [entry for entry in entries if entry["arm"] == arm]
        if own[0]["rate"] is None:
            continue
        reached = any(entry["past_knee"] for entry in own)
        text = "lies below the first rate" if knee is None else f"is at {knee:g} requests/s"
        found.append(f"the knee of {arm} {text}" if reached else f"the knee of {arm} was not reached")
    return found


def _rate(entry: Mapping[str, Any]) -> str:
    return "the trace" if entry["rate"] is None else f"{entry['rate']:g} requests/s"


def _entry(members: Sequence[Row]) -> dict[str, Any]:
    first = members[0]
    entry: dict[str, Any] = {
        **{key: first[key] for key in ("arm", "kind", "adapters", "lora_rank", "rate")},
        "repeats": len(members),
        "requests": sum(row["requests"] for row in members),
        "failed": sum(row["failed"] for row in members),
        "short": sum(row["short"] for row in members),
        "error": next((row["error"]["message"] for row in members if row["error"]), None),
        "requests_per_s": _median([row["requests_per_s"] for row in members]),
        "output_tokens_per_s": _median([row["output_tokens_per_s"] for row in members]),
    }
    for metric in METRICS:
        for share in ("p50", "p95", "p99"):
            entry[f"{metric}_{share}"] = _median([row[metric][share] for row in members])
    fair = [row["fairness"] for row in members if row["fairness"]]
    for end in ("min", "median", "max"):
        entry[f"adapter_ttft_s_{end}"] = _median([item["ttft_s"][end] for item in fair])
    entry["jain_index"] = _median([item["jain_index"] for item in fair])
    return entry


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
