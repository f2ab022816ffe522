"""Two arms' samples, paired by example: what is compared, and what is left out and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preft.eval.stats import Paired, compare_pairs, holm, verdict

Sample = Mapping[str, Any]
"""One example as the harness logs it."""


@dataclass(frozen=True)
class Comparison:
    """One metric of one task under two arms.

    Attributes:
        task: The task.
        filter: The harness's filter that made the answers.
        metric: The metric.
        first: Name of the first arm.
        second: Name of the second; differences are second minus first.
        paired: The numbers.
        adjusted: p-value after Holm's correction over all tasks and metrics of these two arms.
        verdict: What may be said about the second arm: `better`, `worse` or `cannot tell`; `higher` or `lower` for a
            metric that is not good or bad by itself.
        reason: Why.
        left_out: Examples by the reason for which they are not paired.
    """

    task: str
    filter: str
    metric: str
    first: str
    second: str
    paired: Paired
    adjusted: float | None
    verdict: str
    reason: str
    left_out: Mapping[str, tuple[int, ...]]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "task": self.task,
            "filter": self.filter,
            "metric": self.metric,
            "arms": [self.first, self.second],
            **{("mean_" + key if key in ("first", "second") else key): v for key, v in self.paired.to_dict().items()},
            "p_adjusted": self.adjusted,
            "verdict": self.verdict,
            "reason": self.reason,
            "left_out": {reason: list(ids) for reason, ids in self.left_out.items()},
        }


def compare_arms(
    names: tuple[str, str],
    first: Mapping[str, Sequence[Sample]],
    second: Mapping[str, Sequence[Sample]],
    *,
    higher_is_better: Mapping[str, Mapping[str, Any]] | None = None,
    failed: Collection[tuple[str, int]] = (),
    seed: int = 0,
) -> tuple[list[Comparison], list[str]]:
    """Compares two arms on every metric that gives one number an example.

    Args:
        names: The arms.
        first: The first arm's samples by task, in any order.
        second: The second arm's.
        higher_is_better: By task and metric; upwards where it does not say, no direction where it says None.
        failed: Task and example of requests that failed in either arm.
        seed: Of the resampling.

    Returns:
        The comparisons, and the metrics that cannot be paired.
    """
    found: list[tuple[tuple[str, str, str], Paired, dict[str, tuple[int, ...]]]] = []
    skipped: list[str] = []
    for task in sorted(set(first) & set(second)):
        for key in sorted({_key(task, sample, metric) for sample in first[task] for metric in sample["metrics"]}):
            _, kind, metric = key
            upper = {sample["doc_id"]: sample for sample in first[task] if sample["filter"] == kind}
            lower = {sample["doc_id"]: sample for sample in second[task] if sample["filter"] == kind}
            if not all(is_number(sample.get(metric)) for sample in (*upper.values(), *lower.values())):
                skipped.append(f"{task} {metric}: it does not give one number an example")
                continue
            ids, left_out = _pairs(task, metric, upper, lower, failed)
            values = [[float(side[index][metric]) for index in ids] for side in (upper, lower)]
            found.append((key, compare_pairs(*values, seed=seed), left_out))
    adjusted = holm([paired.p_value for _, paired, _ in found])
    comparisons = []
    for ((task, kind, metric), paired, left_out), p_value in zip(found, adjusted, strict=True):
        upwards = ((higher_is_better or {}).get(task) or {}).get(metric, True)
        word, reason = verdict(paired, p_value, higher_is_better=upwards)
        comparisons.append(Comparison(task, kind, metric, *names, paired, p_value, word, reason, left_out))
    return comparisons, skipped


def _key(task: str, sample: Sample, metric: str) -> tuple[str, str, str]:
    return task, str(sample["filter"]), metric


def is_number(value: Any) -> bool:
    """Whether an example's value of a metric is one number."""
    return isinstance(value, bool | int | float) or hasattr(value, "__float__")


def _pairs(
    task: str,
    metric: str,
    first: Mapping[int, Sample],
    second: Mapping[int, Sample],
    failed: Collection[tuple[str, int]],
) -> tuple[list[int], dict[str, tuple[int, ...]]]:
    """Examples that both arms have, and those left out by reason."""
    left_out: dict[str, list[int]] = {}
    ids: list[int] = []
    for index in sorted(set(first) | set(second)):
        if index not in first or index not in second:
            reason = "only in one arm"
        elif (task, index) in failed:
            reason = "failed"
        elif first[index].get("doc_hash") != second[index].get("doc_hash"):
            reason = "another example of the same number"
        elif not all(math.isfinite(float(side[index][metric])) for side in (first, second)):
            reason = "not a finite number"
        else:
            ids.append(index)
            continue
        left_out.setdefault(reason, []).append(index)
    return ids, {reason: tuple(found) for reason, found in left_out.items()}
