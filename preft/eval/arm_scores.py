"""One arm's means with their intervals, from its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from preft.eval.pairing import Sample, is_number
from preft.eval.passk import mean_interval
from preft.eval.stats import paired_bootstrap


@dataclass(frozen=True)
class ArmScore:
    """One metric of one task under one arm.

    Attributes:
        task: The task.
        filter: The harness's filter that made the answers.
        metric: The metric.
        num_examples: Examples with a finite number.
        mean: Their mean.
        low: Lower end of its 95 % interval, over examples; None where the sample gives none.
        high: Upper end.
    """

    task: str
    filter: str
    metric: str
    num_examples: int
    mean: float
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def arm_scores(samples: Mapping[str, Sequence[Sample]], *, seed: int = 0) -> list[ArmScore]:
    """Means and intervals of every metric that gives one number an example.

    Args:
        samples: One arm's samples by task.
        seed: Of the resampling.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for task, rows in samples.items():
        for row in rows:
            for metric in row["metrics"]:
                value: Any = row.get(metric)
                if is_number(value) and math.isfinite(float(value)):
                    found.setdefault((task, str(row["filter"]), metric), []).append(float(value))
    return [
        ArmScore(*key, len(values), math.fsum(values) / len(values), *_interval(values, seed))
        for key, values in found.items()
    ]


def _interval(values: Sequence[float], seed: int) -> tuple[float | None, float | None]:
    if all(0 <= value <= 1 for value in values):
        return mean_interval(values, seed=seed)
    _, low, high = paired_bootstrap(values, seed=seed)
    return low, high
