"""Statistics on data whose answers are known."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from preft.bench.stats import extent, fairness_index, percentile, ratio_interval, spread


def test_percentiles() -> None:
    values = [float(value) for value in range(101)]
    random.Random(1).shuffle(values)
    assert spread(values) == {"p50": 50, "p95": 95, "p99": 99}
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None
    assert extent([3.0, 1.0, 2.0]) == {"min": 1, "median": 2, "max": 3}
    assert extent([])["median"] is None


def test_fairness_index() -> None:
    assert fairness_index([5.0, 5.0, 5.0]) == pytest.approx(1)
    assert fairness_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(1 / 4)
    assert fairness_index([1.0, 3.0]) == pytest.approx(16 / 20)
    assert fairness_index([]) is None


def test_the_ratio_is_the_mean_of_pairs() -> None:
    found = ratio_interval([90.0, 99.0, 81.0], [100.0, 110.0, 90.0])
    assert found is not None
    assert found.ratio == pytest.approx(0.9)
    assert (found.low, found.high) == (pytest.approx(0.9), pytest.approx(0.9))
    assert found.includes_one is False


def test_the_interval_is_that_of_student() -> None:
    logs = [0.02, -0.01, 0.05, 0.00]
    found = ratio_interval([math.exp(value) for value in logs], [1.0] * 4)
    assert found is not None
    reach = 3.182 * statistics.stdev(logs) / 2
    assert math.log(found.high / found.ratio) == pytest.approx(reach, rel=0.05)  # type: ignore[operator]
    assert found.includes_one is True


@pytest.mark.parametrize("repeats", [3, 5])
def test_it_covers_what_it_promises(repeats: int) -> None:
    """Two equal arms: in at least 9 of 10 experiments the interval includes 1; and not in all of them."""
    draw = random.Random(7)
    experiments = 200
    held = 0
    for _ in range(experiments):
        upper = [100 * math.exp(draw.gauss(0, 0.03)) for _ in range(repeats)]
        lower = [100 * math.exp(draw.gauss(0, 0.03)) for _ in range(repeats)]
        found = ratio_interval(upper, lower)
        assert found is not None
        held += bool(found.includes_one)
    assert 0.9 * experiments <= held < experiments


def test_a_real_difference_is_told_from_noise() -> None:
    found = ratio_interval([80.0, 81.0, 79.5], [100.0, 100.5, 99.0])
    assert found is not None
    assert found.includes_one is False
    assert found.high is not None
    assert found.high < 0.9


def test_undefined_ratios() -> None:
    assert ratio_interval([], []) is None
    assert ratio_interval([1.0], [0.0]) is None
    single = ratio_interval([2.0], [1.0])
    assert single is not None
    assert (single.ratio, single.low, single.high, single.includes_one) == (pytest.approx(2), None, None, None)


def test_the_same_data_give_the_same_interval() -> None:
    data = [1.0, 1.1, 0.9, 1.05]
    assert ratio_interval(data, [1.0] * 4) == ratio_interval(data, [1.0] * 4)
