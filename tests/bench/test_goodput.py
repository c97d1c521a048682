"""The fit of goodput's times."""

import itertools

import numpy as np
import pytest

from specjax.assembly.companions import Ruled
from specjax.assembly.registry import DRAFTERS as REGISTRY
from specjax.assembly.registry import parse
from specjax.bench import goodput
from specjax.bench.goodput import Step, fit
from specjax.draft import Goodput


def steps_of(rule, noise=lambda: 1.0):
    cases = itertools.product((0, 1, 2, 4, 8), (1, 4, 16), (64, 512))
    return [Step(k, b, c * b, float(rule.cost(k, b, c * b)) * noise()) for k, b, c in cases]


def test_the_fit_finds_the_rules_own_times():
    rule = Goodput(1.5, 0.05, 6.0, 0.002, 0.3)
    found, error = fit(steps_of(rule))
    assert error < 1e-6
    np.testing.assert_allclose([found[name] for name in goodput.TIMES], [1.5, 0.05, 6.0, 0.002, 0.3], rtol=1e-5)
    rng = np.random.default_rng(0)
    noisy, error = fit(steps_of(rule, lambda: rng.uniform(0.95, 1.05)))
    assert 0.01 < error < 0.1 and min(noisy.values()) >= 0


@pytest.mark.slow
def test_the_command_prints_a_line_that_parses(capsys):
    words = [
        "--model",
        "tiny-draft",
        "--length",
        "2",
        "--batch",
        "1,2",
        "--context",
        "16,32",
        "--steps",
        "2",
        "--repeats",
        "1",
    ]
    assert goodput.main(words) == 0
    made = parse("drafter", REGISTRY, capsys.readouterr().out.strip())
    assert isinstance(made, Ruled) and made.length == 2 and made.rule.target_pass + made.rule.target_token > 0
    assert goodput.main(["--context", "2000"]) == 2 and "ask for a shorter context" in capsys.readouterr().err
    assert goodput.main(["--batch", "0"]) == 2 and "--batch must be a comma list" in capsys.readouterr().err
