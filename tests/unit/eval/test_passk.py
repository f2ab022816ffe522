"""pass@k against its definition, and its intervals against statsmodels and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from preft.errors import UsageError
from preft.eval.arm_scores import arm_scores
from preft.eval.passk import mean_interval, pass_at_k, reported_k, wilson_interval

proportion = pytest.importorskip("statsmodels.stats.proportion")


@pytest.mark.parametrize(("num_answers", "k"), [(1, 1), (4, 1), (4, 3), (5, 5), (7, 2)])
def test_it_is_the_mean_over_all_choices_of_k_answers(num_answers: int, k: int) -> None:
    for right in range(num_answers + 1):
        answers = [index < right for index in range(num_answers)]
        choices = [any(choice) for choice in itertools.combinations(answers, k)]
        assert pass_at_k(num_answers, right, k) == pytest.approx(sum(choices) / len(choices))


def test_it_is_unbiased_where_the_plain_formula_is_not() -> None:
    """10 answers, each right with probability 0.2; pass@4 is 1 - 0.8^4."""
    draw = np.random.default_rng(0)
    counts = draw.binomial(10, 0.2, size=20_000)
    truth = 1 - 0.8**4
    assert np.mean([pass_at_k(10, int(count), 4) for count in counts]) == pytest.approx(truth, abs=0.006)
    plain = np.mean([1 - (1 - count / 10) ** 4 for count in counts])
    assert abs(plain - truth) > 0.03


@pytest.mark.parametrize(("answers", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_counts_without_a_meaning_are_refused(answers: int, right: int, k: int) -> None:
    with pytest.raises(UsageError, match="cannot be estimated"):
        pass_at_k(answers, right, k)


def test_which_k_are_reported() -> None:
    assert [reported_k(count) for count in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (3, 40), (1, 1), (500, 1000)])
def test_the_interval_of_a_share_is_wilsons(right: int, count: int) -> None:
    expected = proportion.proportion_confint(right, count, method="wilson")
    assert wilson_interval(right, count) == pytest.approx(expected, abs=1e-12)
    values = [1.0] * right + [0.0] * (count - right)
    assert mean_interval(values) == wilson_interval(right, count)


def test_the_interval_of_pass_at_k_covers() -> None:
    """60 problems of mixed difficulty with 8 answers each, 400 times: the interval holds the truth as often as it says.

    Treating the 480 answers as independent examples, the negative control, is too narrow.
    """
    draw = np.random.default_rng(4)
    truth = 1.0 - np.mean([(1 - p) ** 2 for p in np.random.default_rng(9).beta(0.4, 1.0, 400_000)])
    covered = naive = 0
    for run in range(400):
        counts = draw.binomial(8, draw.beta(0.4, 1.0, 60))
        values = [pass_at_k(8, int(count), 2) for count in counts]
        low, high = mean_interval(values, seed=run)
        assert low is not None
        assert high is not None
        covered += low <= truth <= high
        reach = 1.96 * math.sqrt(np.mean(values) * (1 - np.mean(values)) / 480)
        naive += abs(np.mean(values) - truth) <= reach
    # Four standard errors of a share of 0.95 over 400 runs.
    assert covered / 400 >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400)
    assert naive / 400 < 0.8


def test_no_examples_or_one_value_give_no_interval() -> None:
    assert mean_interval([]) == (None, None)
    assert mean_interval([0.5, 0.5, 0.5]) == (None, None)


def test_scores_of_an_arm() -> None:
    rows = [
        {"doc_id": index, "filter": "none", "metrics": ["exact", "length", "odd"], "exact": float(index < 3),
         "length": 50.0 + index, "odd": (1.0, 2)}
        for index in range(12)
    ]  # fmt: skip
    rows[0]["length"] = math.inf
    exact, length = arm_scores({"t": rows})
    assert (exact.metric, exact.num_examples, exact.mean) == ("exact", 12, 0.25)
    assert (exact.low, exact.high) == wilson_interval(3, 12)
    assert (length.num_examples, length.mean) == (11, 56.0)
    assert length.low is not None
    assert length.low < 56.0
    assert exact.to_dict()["task"] == "t"
