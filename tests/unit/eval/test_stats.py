"""Paired statistics against known data, scipy, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from preft.errors import UsageError
from preft.eval.stats import (
    LEVEL,
    compare_pairs,
    holm,
    mcnemar_exact,
    paired_bootstrap,
    proportion_interval,
    verdict,
)

scipy_stats = pytest.importorskip("scipy.stats")


def test_mcnemar_on_the_textbook_table() -> None:
    """The table of statsmodels' own test, [[101, 121], [59, 33]]: statistic 59, p = 4.434e-06."""
    assert mcnemar_exact(121, 59) == pytest.approx(4.434e-06, rel=1e-3)


@pytest.mark.parametrize(("higher", "lower"), [(0, 0), (1, 0), (5, 0), (6, 0), (7, 3), (40, 40), (900, 820)])
def test_mcnemar_is_the_binomial_test(higher: int, lower: int) -> None:
    total = higher + lower
    expected = scipy_stats.binomtest(higher, total).pvalue if total else 1.0
    assert mcnemar_exact(higher, lower) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_proportions_on_published_data() -> None:
    """Bonett and Price's formula, worked out by hand for 1, 7 of 21 (airway hyper-responsiveness before and after)."""
    low, high = proportion_interval(1, 7, 21)
    assert (low, high) == pytest.approx((-0.5083, -0.0135), abs=2e-3)


def test_the_interval_of_proportions_covers() -> None:
    draw = np.random.default_rng(0)
    cells = (0.15, 0.05, 0.8)
    covered = 0
    for higher, lower, _ in draw.multinomial(60, cells, size=2000):
        low, high = proportion_interval(int(higher), int(lower), 60)
        covered += low <= cells[0] - cells[1] <= high
    assert covered / 2000 >= 0.94


def test_the_bootstrap_agrees_with_student_on_normal_data() -> None:
    draw = np.random.default_rng(1)
    for shift in (0.0, 0.2, 0.5):
        differences = draw.normal(shift, 1.0, size=120)
        p_value, low, high = paired_bootstrap(differences.tolist(), resamples=10_000)
        student = scipy_stats.ttest_1samp(differences, 0.0)
        ends = student.confidence_interval(0.95)
        assert p_value == pytest.approx(student.pvalue, abs=0.02)
        assert (low, high) == pytest.approx((ends.low, ends.high), abs=0.02)


@pytest.mark.parametrize("size", [12, 60])
@pytest.mark.parametrize("kind", ["normal", "skewed", "binary"])
def test_the_error_of_the_first_kind_is_nominal(size: int, kind: str) -> None:
    """1,000 runs without a difference: at most the nominal share is called real."""
    draw = np.random.default_rng(7)
    rejected = 0
    for run in range(1000):
        if kind == "binary":
            first, second = (draw.random(size) < 0.5, draw.random(size) < 0.5)
        else:
            make = draw.standard_normal if kind == "normal" else draw.standard_exponential
            first, second = make(size), make(size)
        if kind == "binary":
            p_value = compare_pairs(first.astype(float).tolist(), second.astype(float).tolist()).p_value
        else:
            p_value, _, _ = paired_bootstrap((second - first).tolist(), seed=run, resamples=400)
        rejected += p_value is not None and p_value < LEVEL
    # Three standard errors of a share of 0.05 over 1,000 runs; McNemar's exact test is conservative.
    assert rejected / 1000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    if kind != "binary":
        assert rejected / 1000 >= 0.02


def test_a_detectable_difference_is_found_with_the_stated_power() -> None:
    draw = np.random.default_rng(3)
    pilot = compare_pairs([0.0] * 80, draw.normal(0, 1, 80).tolist())
    assert pilot.detectable is not None
    found = 0
    for run in range(400):
        values = draw.normal(2.8016 / math.sqrt(80), 1.0, 80)
        p_value, _, _ = paired_bootstrap(values.tolist(), seed=run, resamples=400)
        found += p_value is not None and p_value < LEVEL
    assert pilot.detectable == pytest.approx(2.8016 * pilot.difference / pilot.standardised / math.sqrt(80), rel=1e-3)  # type: ignore[operator]
    assert found / 400 == pytest.approx(0.80, abs=0.07)


def test_holm_is_the_published_procedure() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, None, 0.9]) == [0.02, None, 0.9]
    assert holm([]) == []


@pytest.mark.parametrize("table", [[[101, 121], [59, 33]], [[3, 0], [9, 4]], [[50, 7], [7, 2]], [[0, 1], [0, 0]]])
def test_mcnemar_is_that_of_statsmodels(table: list[list[int]]) -> None:
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    expected = tables.mcnemar(table, exact=True).pvalue
    (both, first_only), (second_only, neither) = table
    first = [1] * both + [1] * first_only + [0] * second_only + [0] * neither
    second = [1] * both + [0] * first_only + [1] * second_only + [0] * neither
    paired = compare_pairs(first, second)
    assert paired.test == "mcnemar-exact"
    assert paired.p_value == pytest.approx(expected, rel=1e-9)
    assert paired.difference == pytest.approx((second_only - first_only) / sum(map(sum, table)))


def test_holm_is_that_of_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    draw = np.random.default_rng(2)
    for size in (1, 2, 7, 40):
        p_values = [*(draw.random(size) ** 3).tolist(), 0.01, 0.01]
        expected = multitest.multipletests(p_values, method="holm")[1]
        assert holm(p_values) == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("count", "deviation"), [(50, 1.0), (400, 0.3), (2000, 12.0)])
def test_the_detectable_difference_is_that_of_statsmodels(count: int, deviation: float) -> None:
    """By the normal approximation; Student's test of 50 pairs finds it a little less often."""
    power = pytest.importorskip("statsmodels.stats.power")
    values = np.random.default_rng(6).normal(0.0, 1.0, count)
    values = (values - values.mean()) / values.std(ddof=1) * deviation
    found = compare_pairs([0.0] * count, values.tolist()).detectable
    assert found is not None
    normal = power.NormalIndPower(ddof=0).power(found / deviation, nobs1=count, alpha=0.05, ratio=0)
    student = power.TTestPower().power(found / deviation, nobs=count, alpha=0.05)
    # Theirs counts finds in the wrong direction too, about one in a million.
    assert normal == pytest.approx(0.8, abs=1e-5)
    assert student == pytest.approx(0.8, abs=0.02)


def test_over_many_tasks_the_chance_of_any_false_finding_is_nominal() -> None:
    """1,000 runs of eight tasks without a difference; uncorrected, the negative control, far more than 5 % have one."""
    draw = np.random.default_rng(8)
    corrected = uncorrected = 0
    for _ in range(1000):
        p_values: list[float | None] = []
        for _task in range(8):
            # Half of the 200 pairs differ, in either direction alike.
            higher = int(draw.binomial(100, 0.5))
            p_values.append(mcnemar_exact(higher, 100 - higher))
        corrected += any(value is not None and value < LEVEL for value in holm(p_values))
        uncorrected += any(value is not None and value < LEVEL for value in p_values)
    assert corrected / 1000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert uncorrected / 1000 > 0.15


def test_a_metric_without_a_direction_is_higher_or_lower() -> None:
    paired = compare_pairs([0.5] * 30, [1.5 + index % 2 for index in range(30)])
    assert verdict(paired, paired.p_value, higher_is_better=None)[0] == "higher"
    assert verdict(compare_pairs([1.0] * 30, [0.0] * 30), 0.01, higher_is_better=None)[0] == "lower"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([1, 0, 1, 0, 1], [0, 1, 0, 1, 0], "too few"),
        ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1], "too few"),
        ([1.0] * 50, [1.0] * 50, "all 50 pairs are equal"),
        ([0.0] * 50, [0.0] * 50, "all 50 pairs are equal"),
        ([0.3, 0.7] * 20, [0.3, 0.7] * 20, "all 40 pairs are equal"),
        ([], [], "no example"),
        ([0, 1] * 30, [1, 0] * 30, "compatible with the sample"),
    ],
)
def test_an_uncertain_result_is_never_called_equal(first: list[float], second: list[float], reason: str) -> None:
    paired = compare_pairs(first, second)
    word, why = verdict(paired, paired.p_value)
    assert word == "cannot tell"
    assert reason in why
    assert "no difference" not in why
    if first and paired.test == "mcnemar-exact":
        assert paired.low is not None
        assert paired.high is not None
        assert paired.low < paired.high


def test_a_real_difference_has_a_direction() -> None:
    paired = compare_pairs([0] * 30, [1] * 20 + [0] * 10)
    assert verdict(paired, paired.p_value)[0] == "better"
    assert verdict(paired, paired.p_value, higher_is_better=False)[0] == "worse"
    assert paired.difference == pytest.approx(2 / 3)


def test_values_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(UsageError, match="same examples"):
        compare_pairs([1.0], [1.0, 0.0])
    with pytest.raises(UsageError, match="finite"):
        compare_pairs([math.nan], [1.0])


def test_the_same_seed_gives_the_same_numbers() -> None:
    values = [0.1, 0.4, -0.2, 0.9, 0.3, 0.2, 0.05]
    assert paired_bootstrap(values, seed=4) == paired_bootstrap(values, seed=4)
