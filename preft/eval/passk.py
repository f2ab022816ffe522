"""pass@k: the chance that at least one of k answers is right, from n answers to each problem."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from preft.errors import UsageError
from preft.eval.stats import LEVEL, paired_bootstrap

_METRIC = re.compile(r"pass@(\d+)")


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The unbiased estimate for one problem: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.

    Raises:
        UsageError: There are fewer answers than k, or the counts make no sense.
    """
    if not 0 <= num_right <= num_answers or not 1 <= k <= num_answers:
        raise UsageError(
            "pass@k cannot be estimated",
            got=f"k = {k}, {num_right} right of {num_answers}",
            accepted="1 <= k <= number of answers",
        )
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def reported_k(num_answers: int) -> tuple[int, ...]:
    """For which k: 1, 2, 4, ... and the number of answers itself."""
    powers = (1 << power for power in range(num_answers.bit_length()))
    return tuple(sorted({k for k in powers if k <= num_answers} | {num_answers}))


def is_pass_metric(metric: str) -> bool:
    """Whether a metric is a `pass@k`."""
    return _METRIC.fullmatch(metric) is not None


def mean_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float | None, float | None]:
    """95 % interval of a mean over problems that each give a value between 0 and 1.

    Problems are what is drawn at random, so they are what is resampled; the answers to one problem are no independent
    examples. Values that are all 0 or 1 get Wilson's interval, which is not empty where all are equal. Others get the
    studentised bootstrap of `preft.eval.stats`, cut to 0 and 1.

    Returns:
        Lower and upper end, or None for both where the sample gives none.
    """
    count = len(values)
    if not count:
        return None, None
    if all(value in (0, 1) for value in values):
        return wilson_interval(round(sum(values)), count)
    _, low, high = paired_bootstrap(values, seed=seed)
    if low is None or high is None:
        return None, None
    return max(0.0, low), min(1.0, high)


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    z = statistics.NormalDist().inv_cdf(1 - LEVEL / 2)
    share, square = num_right / count, z * z
    centre = (share + square / (2 * count)) / (1 + square / count)
    reach = z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return max(0.0, centre - reach), min(1.0, centre + reach)
