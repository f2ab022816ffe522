"""Two results against each other: has anything become slower?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from preft.bench.rows import RATIOS, Row, point_of
from preft.errors import UsageError

METRICS = ("output_tokens_per_s", *RATIOS, "decode_tokens_per_s")
SETUP_KEYS = (
    "model",
    "slots",
    "direft_rank",
    "input_len",
    "output_len",
    "requests",
    "mode",
    "popularity",
    "dtype",
    "targets",
    "tp",
)


@dataclass(frozen=True)
class Change:
    """One arm and point in both results.

    Attributes:
        arm: Its label.
        adapters: Number of adapters.
        rank: LoRA rank of the point.
        before: Median over the first result's repeats.
        after: Median over the second's.
        change: `after / before - 1`.
        before_repeats: Repeats behind `before`.
        after_repeats: Repeats behind `after`.
        separate: Whether the repeats of both do not overlap, which noise makes unlikely.
        regressed: Whether it became worse by more than the threshold.
    """

    arm: str
    adapters: int
    rank: int | str
    before: float
    after: float
    change: float
    before_repeats: int
    after_repeats: int
    separate: bool
    regressed: bool

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Two results side by side.

    Attributes:
        metric: What is compared; more is better.
        threshold: Share that may be lost.
        changes: One an arm and point that both have.
        only_before: Arms and points that only the first has.
        only_after: Those that only the second has.
        differences: Set-up values that differ, with both values.
        partial: Whether one of the results is partial.
    """

    metric: str
    threshold: float
    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differences: tuple[str, ...]
    partial: bool

    @property
    def regressed(self) -> bool:
        """Whether anything became worse by more than the threshold."""
        return any(change.regressed for change in self.changes)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "changes": [change.to_dict() for change in self.changes], "regressed": self.regressed}


def compare(
    before: Sequence[Row], after: Sequence[Row], *, threshold: float = 0.05, metric: str = METRICS[0]
) -> Comparison:
    """Compares two results, arm by arm and point by point.

    Args:
        before: Rows of the first.
        after: Rows of the second.
        threshold: Share that may be lost, such as 0.05.
        metric: One of `METRICS`.

    Raises:
        UsageError: They have nothing in common, or an argument cannot be meant.
    """
    if metric not in METRICS:
        raise UsageError("`--metric` is not valid", got=f"`{metric}`", accepted=", ".join(METRICS))
    if not 0 <= threshold < 1:
        raise UsageError("`--threshold` is not valid", got=f"{threshold}", accepted="0 to 1, such as 0.05")
    old, new = _values(before, metric), _values(after, metric)
    shared = [key for key in old if key in new]
    if not shared:
        raise UsageError(
            "The two results have no measured arm in common",
            got=f"{', '.join(map(_name, old)) or 'none'} and {', '.join(map(_name, new)) or 'none'}",
        )
    return Comparison(
        metric=metric,
        threshold=threshold,
        changes=tuple(_change(key, old[key], new[key], threshold) for key in shared),
        only_before=tuple(_name(key) for key in old if key not in new),
        only_after=tuple(_name(key) for key in new if key not in old),
        differences=_differences(before[0], after[0]),
        partial=any(row.get("partial") for row in (*before, *after)),
    )


_Key = tuple[str, int, int | str]


def _values(rows: Sequence[Row], metric: str) -> dict[_Key, list[float]]:
    found: dict[_Key, list[float]] = {}
    for row in rows:
        if row.get(metric) is not None:
            found.setdefault((row["arm"], *point_of(row)), []).append(row[metric])
    return found


def _name(key: _Key) -> str:
    return f"{key[0]} at {key[1]} adapters of rank {key[2]}"


def _change(key: _Key, old: list[float], new: list[float], threshold: float) -> Change:
    before, after = statistics.median(old), statistics.median(new)
    change = after / before - 1
    return Change(
        arm=key[0],
        adapters=key[1],
        rank=key[2],
        before=before,
        after=after,
        change=change,
        before_repeats=len(old),
        after_repeats=len(new),
        separate=max(new) < min(old) or min(new) > max(old),
        regressed=change < -threshold,
    )


def _differences(before: Row, after: Row) -> tuple[str, ...]:
    old, new = before["setup"], after["setup"]
    found = [f"{key}: {old.get(key)} and {new.get(key)}" for key in SETUP_KEYS if old.get(key) != new.get(key)]
    if old.get("machine") != new.get("machine"):
        found.append("the machine")
    return tuple(found)
