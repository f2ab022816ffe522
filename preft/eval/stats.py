"""Is the difference between two arms real? Statistics over the same examples, scored by both.

A test, an interval and the smallest difference that could have been found; never the claim that there is none. What a
benchmark's few repeats deserve is another matter (`preft.bench.stats`). No task, file or model is known here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from preft.errors import UsageError

LEVEL = 0.05
"""Chance of calling a difference real where there is none."""
POWER = 0.80
"""Chance of finding a difference of the detectable size."""
RESAMPLES = 2000
LEAST_PAIRS = 6
"""With fewer, not even a win in every pair is significant: 2 / 2^5 is 0.0625."""
_CHUNK = 1 << 21
"""Random numbers held at once."""


@dataclass(frozen=True)
class Paired:
    """Two arms on the same examples; every difference is second minus first.

    Attributes:
        test: `mcnemar-exact`, `paired-bootstrap`, or `none` without pairs.
        num_pairs: Examples that both arms have.
        first: Mean of the first arm, or None without pairs.
        second: Mean of the second.
        difference: Mean of the paired differences.
        low: Lower end of its 95 % interval, or None where there is none to give.
        high: Upper end.
        p_value: Two-sided, before any correction; None without a test.
        higher: Pairs in which the second arm has the higher value.
        lower: Pairs in which it has the lower one.
        standardised: Mean difference over the standard deviation of the differences; None where that is 0.
        detectable: Difference that a sample of this size finds with 80 % power; None where it cannot be said.
    """

    test: str
    num_pairs: int
    first: float | None = None
    second: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    higher: int = 0
    lower: int = 0
    standardised: float | None = None
    detectable: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def mcnemar_exact(higher: int, lower: int) -> float:
    """Two-sided p-value of the exact McNemar test.

    Args:
        higher: Examples that only the second arm has right.
        lower: Examples that only the first arm has right.
    """
    total, least = higher + lower, min(higher, lower)
    tail = sum(math.comb(total, count) for count in range(least + 1))
    # Whole numbers until here: a float would overflow beyond 1,000 discordant pairs.
    return min(1.0, 2 * tail / (1 << total)) if total < 1000 else min(1.0, 2.0 * _ratio(tail, total))


def _ratio(tail: int, total: int) -> float:
    """`tail / 2^total` for numbers beyond a float."""
    shift = max(0, tail.bit_length() - 64)
    return math.ldexp(float(tail >> shift), shift - total)


def proportion_interval(higher: int, lower: int, num_pairs: int) -> tuple[float, float]:
    """95 % interval of the difference of two paired proportions; never empty, even where no pair differs.

    Source: Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions based on
    paired data" (2012): Wald's interval with one more pair in each discordant cell.
    """
    size = num_pairs + 2
    up, down = (higher + 1) / size, (lower + 1) / size
    reach = _quantile(1 - LEVEL / 2) * math.sqrt((up + down - (up - down) ** 2) / size)
    return max(-1.0, up - down - reach), min(1.0, up - down + reach)


def paired_bootstrap(
    differences: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float | None, float | None, float | None]:
    """Two-sided p-value and 95 % interval of a mean difference, by the studentised bootstrap.

    Each resample is measured in its own standard errors. The plain percentile bootstrap would reject too often in
    small samples. A resample without spread counts as extreme, which errs towards "cannot tell".

    Args:
        differences: One a pair.
        seed: Of the resampling.
        resamples: How many.

    Returns:
        p-value, lower and upper end; all None for fewer than two pairs or differences that are all equal. The ends
        are None where the sample is too small for any.
    """
    values = np.asarray(differences, dtype=np.float64)
    count = len(values)
    if count < 2 or float(np.ptp(values)) == 0.0:
        return None, None, None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(count)
    draw = np.random.default_rng(seed)
    distances = []
    step = max(1, _CHUNK // count)
    for start in range(0, resamples, step):
        picked = values[draw.integers(0, count, size=(min(step, resamples - start), count))]
        centres, errors = picked.mean(axis=1), picked.std(axis=1, ddof=1) / math.sqrt(count)
        flat = errors <= 1e-12 * max(1.0, abs(mean))
        scaled = np.abs(centres - mean) / np.where(flat, 1.0, errors)
        distances.append(np.where(flat, np.inf, scaled))
    distance = np.concatenate(distances)
    p_value = (1 + int((distance >= abs(mean) / error).sum())) / (1 + resamples)
    reach = float(np.quantile(distance, 1 - LEVEL, method="higher")) * error
    ends = (mean - reach, mean + reach) if math.isfinite(reach) else (None, None)
    return p_value, *ends


def compare_pairs(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Paired:
    """Compares two arms example by example: the exact McNemar test for 0/1 values, else the paired bootstrap.

    Args:
        first: One value an example.
        second: The other arm's value of the same example.
        seed: Of the resampling.

    Raises:
        UsageError: A value is not a finite number, or the lengths differ.
    """
    if len(first) != len(second):
        raise UsageError("The arms do not have the same examples", got=f"{len(first)} and {len(second)} values")
    if not all(math.isfinite(value) for value in (*first, *second)):
        raise UsageError("A score is not a finite number")
    count = len(first)
    if not count:
        return Paired("none", 0)
    differences = [later - earlier for earlier, later in zip(first, second, strict=True)]
    higher, lower = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    deviation = statistics.stdev(differences) if count > 1 else 0.0
    centre = statistics.fmean(differences)
    low: float | None
    high: float | None
    p_value: float | None
    if all(value in (0, 1) for value in (*first, *second)):
        test, p_value = "mcnemar-exact", mcnemar_exact(higher, lower)
        low, high = proportion_interval(higher, lower, count)
        discordant = (higher + lower + 2) / (count + 2)
        detectable: float | None = min(1.0, _detectable(math.sqrt(discordant), count))
    else:
        test = "paired-bootstrap"
        p_value, low, high = paired_bootstrap(differences, seed=seed)
        detectable = _detectable(deviation, count) if deviation else None
    return Paired(
        test=test,
        num_pairs=count,
        first=statistics.fmean(first),
        second=statistics.fmean(second),
        difference=centre,
        low=low,
        high=high,
        p_value=p_value,
        higher=higher,
        lower=lower,
        standardised=centre / deviation if deviation else None,
        detectable=detectable,
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction of a family of p-values; None stays None and does not count."""
    known = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (value, index) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * value))
        adjusted[index] = running
    return adjusted


def verdict(paired: Paired, adjusted: float | None, *, higher_is_better: bool | None = True) -> tuple[str, str]:
    """What may be said about the second arm against the first.

    Args:
        paired: The comparison.
        adjusted: Its p-value after correction.
        higher_is_better: The metric's direction, or None if neither end is the good one.

    Returns:
        `better`, `worse` (without a direction `higher`, `lower`) or `cannot tell`, and why.
    """
    unsure = "cannot tell"
    if not paired.num_pairs:
        return unsure, "no example was scored by both"
    if not paired.higher + paired.lower:
        return unsure, f"all {paired.num_pairs} pairs are equal; {_room(paired)}"
    if paired.num_pairs < LEAST_PAIRS:
        return unsure, f"{paired.num_pairs} pairs are too few for any result to be significant"
    if adjusted is None:
        return unsure, f"every pair differs by the same amount; {_room(paired)}"
    if adjusted < LEVEL and paired.difference:
        if higher_is_better is None:
            word = "higher" if paired.difference > 0 else "lower"
        else:
            word = "better" if (paired.difference > 0) == higher_is_better else "worse"
        return word, f"p = {adjusted:.2g} after correction, {paired.num_pairs} pairs"
    return unsure, f"p = {adjusted:.2g} after correction; {_room(paired)}"


def _room(paired: Paired) -> str:
    """What the sample leaves open."""
    if paired.low is None or paired.high is None:
        return "the sample gives no interval"
    text = f"{paired.low:+.3g} to {paired.high:+.3g} is compatible with the sample"
    return text if paired.detectable is None else f"{text}, and {paired.detectable:.3g} could have been found"


def _detectable(deviation: float, count: int) -> float:
    """Smallest mean difference found with the given power, by the normal approximation."""
    return (_quantile(1 - LEVEL / 2) + _quantile(POWER)) * deviation / math.sqrt(count)


def _quantile(share: float) -> float:
    return statistics.NormalDist().inv_cdf(share)
