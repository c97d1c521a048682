"""Intervals and tests against scipy, enumeration, simulation and a published table."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest, multinomial

from specjax.evaluate.statistics import Paired, paired, verdict, wilson


def shares(right, count):
    return np.asarray([1.0] * right + [0.0] * (count - right))


@pytest.mark.parametrize("count", (1, 2, 7, 50, 200))
def test_wilson_is_scipys(count):
    for right in {0, 1, count // 3, count - 1, count}:
        theirs = binomtest(right, count).proportion_ci(0.95, "wilson")
        assert wilson(shares(right, count)) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert wilson(shares(0, count))[0] == 0 and wilson(shares(count, count))[1] == 1


def test_samples_that_agree_are_worth_one_and_samples_that_differ_are_worth_more():
    agreed = shares(30, 100)
    assert wilson(agreed, 8) == wilson(agreed, 1)
    assert wilson(np.full(100, 0.5), 8) == pytest.approx(tuple(binomtest(400, 800).proportion_ci(0.95, "wilson")))
    assert wilson(shares(100, 100), 8) == wilson(shares(100, 100))
    with pytest.raises(ValueError, match="at least one question"):
        wilson(np.zeros(0))


def test_the_interval_of_samples_covers_as_often_as_it_says():
    """Questions differ in how hard they are: samples taken as independent cover the true accuracy far too rarely."""
    rng, questions, samples, truth = np.random.default_rng(0), 60, 8, 0.8
    covered = naive = 0
    for _ in range(1500):
        right = rng.binomial(samples, rng.beta(0.8, 0.2, questions))
        low, high = wilson(right / samples, samples)
        covered += low <= truth <= high
        low, high = binomtest(int(right.sum()), questions * samples).proportion_ci(0.95, "wilson")
        naive += low <= truth <= high
    assert 0.93 < covered / 1500 < 0.97 and naive / 1500 < 0.75


def counts(both, first, second, neither):
    """Answers of two decoders from a table of who is right."""
    cells = [(1, 1)] * both + [(1, 0)] * first + [(0, 1)] * second + [(0, 0)] * neither
    return np.asarray(cells, float).T


def test_a_published_table():
    """Airway responsiveness before and after a transplantation: Fagerland, Lydersen and Laake 2014 (Bentur et al. 2009)."""
    found = paired(*counts(1, 1, 7, 12))
    assert found.difference == pytest.approx(6 / 21) and (found.better, found.worse) == (7, 1)
    assert found.p_value == pytest.approx(0.0703, abs=5e-5)
    p12, p21 = 2 / 23, 8 / 23  # the formula as published, in cells
    half = 1.959964 * math.sqrt((p12 + p21 - (p21 - p12) ** 2) / 23)
    assert (found.low, found.high) == pytest.approx((p21 - p12 - half, p21 - p12 + half), abs=1e-6)


def test_mcnemar_by_enumeration():
    for better, worse in itertools.product(range(5), range(5)):
        total = better + worse
        ways = [math.comb(total, k) for k in range(total + 1)]
        expected = sum(way for way in ways if way <= ways[better]) / 2**total
        assert paired(*counts(9, worse, better, 3)).p_value == pytest.approx(expected)


@pytest.mark.parametrize("dist", ((0.02, 0.02), (0.05, 0.01), (0.0, 0.03), (0.1, 0.1)))
def test_the_interval_of_a_difference_covers_by_enumeration(dist):
    """Over every outcome of 80 questions, weighed by its probability."""
    total, covered = 80, 0.0
    table = {
        (a, b): paired(*counts(total - a - b, a, b, 0)) for a in range(26) for b in range(26)
    }  # more is next to impossible
    for (worse, better), found in table.items():
        if found.low <= dist[1] - dist[0] <= found.high:
            covered += float(multinomial.pmf([worse, better, total - worse - better], total, [*dist, 1 - sum(dist)]))
    assert covered > 0.94


def test_several_samples_use_the_question_as_unit():
    first, second = np.asarray([0.5, 1.0, 0.25, 0.0]), np.asarray([1.0, 0.75, 0.5, 0.0])
    found = paired(first, second)
    assert found.difference == pytest.approx(0.125) and (found.better, found.worse) == (2, 1)
    assert found.low < 0.125 < found.high and found.p_value == 1.0
    with pytest.raises(ValueError, match="pairs of questions"):
        paired(first, second[:2])


def test_free_needs_the_interval():
    same = lambda n: paired(np.ones(n), np.ones(n))
    assert verdict(same(20), True, 1.0) == "same text"
    assert verdict(same(150), False, 1.0).startswith("not resolved: the interval reaches -1.8 points")
    assert verdict(same(400), False, 1.0) == "free (within 1 points)"
    assert verdict(same(400), False, 0.5).startswith("not resolved")
    few = paired(*counts(388, 8, 4, 0))
    assert few.difference == -0.01 and verdict(few, False, 1.0).startswith("not resolved: the interval reaches -2.")
    many = paired(*counts(300, 60, 10, 30))
    assert verdict(many, False, 1.0).startswith("costs 12.5 points (8.") and many.p_value < 1e-6
    assert verdict(Paired(-0.004, -0.006, -0.002, 0, 9, 0.004), False, 1.0) == "costs 0.4 points (0.2 to 0.6)"
