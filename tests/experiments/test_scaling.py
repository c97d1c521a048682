"""The scaling law of draft models: fits find what points are made of, and the page says what its results do."""

import dataclasses

import numpy as np
import pytest

from experiments.scaling.__main__ import HERE, Fit, Point, largest, page, read, unseen

MADE = Fit(1.5, 0.2, 0.4)


def points(noise=0.0):
    rng = np.random.default_rng(0)
    found = []
    for n, d in [(n, d) for n in (200, 500, 1500) for d in (0.5, 1.5)]:
        at = Point(n, d, 0.0, 0.5)
        found.append(dataclasses.replace(at, tokens_per_step=MADE.of(at) * float(np.exp(noise * rng.normal()))))
    return found


def test_a_fit_finds_what_points_are_made_of():
    found = Fit.to(points(), "tokens_per_step")
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(MADE), rel=1e-6)
    own = largest(points())
    assert (own.parameters, own.tokens) == (1500, 1.5)
    assert unseen(points(), own, "tokens_per_step") == pytest.approx(own.tokens_per_step, rel=1e-6)
    assert unseen(points(0.02), own, "tokens_per_step") != pytest.approx(own.tokens_per_step, rel=1e-4)


def test_a_point_does_not_help_to_predict_itself():
    own = largest(points())
    wrong = dataclasses.replace(own, tokens_per_step=9.0)
    others = [point for point in points() if point != own]
    assert unseen([*others, wrong], wrong, "tokens_per_step") == unseen(points(), own, "tokens_per_step")


def test_the_page_says_what_its_results_do():
    text = (HERE / "README.md").read_text()
    points, shipped = read()
    assert page(text, points, shipped) == text, "run python -m experiments.scaling"
    assert len(points) == 6
    own, all_six = largest(points), Fit.to(points, "tokens_per_step")
    assert f"{unseen(points, own, 'tokens_per_step'):.2f} tokens per step" in text
    assert f"says {all_six.of(shipped):.2f}" in text
    assert f"{all_six.d * np.log(2):.2f} tokens per step ({all_six.d:.3f} ln 2)" in text
    assert f"{all_six.n * np.log(2):.2f} ({all_six.n:.3f} ln 2)" in text
