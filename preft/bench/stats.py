"""Statistics of a benchmark: percentiles, fairness, and ratios with an interval that few repeats deserve."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

RESAMPLES = 2000

_NORMAL = 1.960
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A ratio of two arms and how sure it is.

    Attributes:
        ratio: Geometric mean of the paired ratios.
        low: Lower end of the 95 % interval, or None with fewer than two repeats.
        high: Upper end, or None.
        num_repeats: Pairs it rests on.
        includes_one: Whether no difference is within the interval; None without one.
    """

    ratio: float
    low: float | None
    high: float | None
    num_repeats: int
    includes_one: bool | None

    def to_dict(self) -> dict[str, float | int | bool | None]:
        """As a JSON object."""
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of the values lies, between neighbours by proportion; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """The 50th, 95th and 99th percentile."""
    return {"p50": percentile(values, 0.50), "p95": percentile(values, 0.95), "p99": percentile(values, 0.99)}


def extent(values: Sequence[float]) -> dict[str, float | None]:
    """Least, median and most."""
    if not values:
        return {"min": None, "median": None, "max": None}
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def fairness_index(values: Sequence[float]) -> float | None:
    """Jain's index: 1 where all shares are equal, 1/n where one has everything; None without shares."""
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else None


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval | None:
    """The ratio of two arms that ran side by side in each repeat.

    The bootstrap's standard error of the mean log ratio, times Student's t. The bootstrap's own percentiles would not
    do: those of three repeats cannot reach beyond the repeats' range and cover far less than they say. With
    sqrt(n / (n - 1)) for the resamples' missing degree of freedom, normal noise is covered as promised.

    Args:
        numerators: One value a repeat.
        denominators: The other arm's value of the same repeat.
        seed: Of the resampling.

    Returns:
        None where no repeat has both values, or a value is not positive.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    if not pairs or any(value <= 0 for pair in pairs for value in pair):
        return None
    logs = [math.log(upper / lower) for upper, lower in pairs]
    centre, count = statistics.fmean(logs), len(logs)
    if count < 2:
        return Interval(math.exp(centre), None, None, count, None)
    draw = random.Random(seed)
    means = [statistics.fmean(draw.choices(logs, k=count)) for _ in range(RESAMPLES)]
    deviation = statistics.pstdev(means, centre)
    degrees = count - 1
    quantile = _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else _NORMAL * (1 + 1 / (2 * degrees))
    reach = quantile * deviation * math.sqrt(count / degrees)
    low, high = math.exp(centre - reach), math.exp(centre + reach)
    return Interval(math.exp(centre), low, high, count, low <= 1 <= high)
