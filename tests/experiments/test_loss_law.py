"""The law of the loss: a fit finds what points are made of, and the page says what its results do."""

import dataclasses

import numpy as np
import pytest

from experiments.loss_law.__main__ import HERE, page, read
from experiments.loss_law.fit import LossFit, Point, held_out, predicted

MADE = LossFit(0.4, 40.0, 0.35, 300.0, 0.5)


def points(noise=0.0):
    rng = np.random.default_rng(0)
    at = [(n, d) for n in (5e4, 1.5e5, 5e5) for d in (3e4, 6e4, 1.2e5, 2.4e5)]
    return [Point(int(n), int(d), MADE.of(n, d) * float(np.exp(noise * rng.normal())), 0.5) for n, d in at]


def test_a_fit_finds_what_points_are_made_of():
    own = held_out(points())
    assert (own.parameters, own.tokens) == (500_000, 240_000)
    assert predicted(points()) == pytest.approx(own.loss, rel=1e-3)
    near = predicted(points(0.005))
    assert near == pytest.approx(own.loss, rel=0.05) and near != predicted(points())


def test_the_point_held_out_changes_no_fit():
    others = [point for point in points() if point != held_out(points())]
    wrong = dataclasses.replace(held_out(points()), loss=9.0)
    assert predicted([*others, wrong]) == predicted(points())


def test_the_page_says_what_its_results_do():
    text = (HERE / "README.md").read_text()
    assert page(text, read()) == text, "run python -m experiments.loss_law --show"
    assert len(read()) == 12
