"""The measured acceptance: its estimates against enumeration, its report against the optimum, its page against the report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.forests import accepted

from experiments.acceptance.measure import COUNTS, HERE, PAIRS, agreement, closed, crossed, limit, sampled, written
from specjax.tree import Topology
from specjax.verify import GreedyMulti, KSeq, Recursive, RecursiveWOR
from specjax.verify.bounds import optimal_acceptance

REPORT = json.loads((HERE / "results.json").read_text())


@pytest.mark.slow
def test_rates_are_those_of_the_rules_by_enumeration():
    p, q = np.random.default_rng(0).dirichlet(np.full(8, 0.5), (2, 1))
    draws = 4096
    rates = {
        name: np.asarray(rate)[0] for name, rate in sampled(*map(jnp.float32, (p, q)), draws, jax.random.key(0)).items()
    }
    star = Topology.from_counts("2")
    real = lambda rule, children: accepted(rule, star, [p[0], np.tile(p, (8, 1))], [q[0]], children)
    near = lambda value: pytest.approx(value, abs=4 * 0.5 / np.sqrt(draws))
    assert rates["recursive_wor, without_replacement"][1] == near(real(RecursiveWOR(), "without_replacement"))
    assert rates["recursive, iid"][1] == near(real(Recursive(), "iid"))
    assert rates["coupled, static"][0] == near(agreement(p[0], q[0]))
    assert rates["coupled, static"][7] == rates["recursive_wor, without_replacement"][7] == pytest.approx(1)
    two = {name: rate[0] for name, rate in closed(p, q, 2).items()}
    assert two["k_seq, iid"] == pytest.approx(real(KSeq(), "iid"), abs=1e-7)
    assert two["greedy_multi, greedy_draft"] == pytest.approx(real(GreedyMulti(), "greedy"), abs=1e-12)
    one = {name: rate[0] for name, rate in closed(p, q, 1).items()}
    assert rates["recursive_wor, without_replacement"][0] == near(one["recursive_wor, without_replacement"])


def test_tokens_that_do_not_matter_may_be_left_out():
    p, q = np.random.default_rng(1).dirichlet(np.full(60, 0.05), 2)
    assert (np.maximum(p, q) < 1e-8).any()
    assert limit(p, q, 4) == pytest.approx(optimal_acceptance(p, q, 4), abs=1e-6)


def test_no_rate_is_above_its_optimum_and_every_pair_is_there():
    rows = REPORT["rows"]
    assert len(rows) == 3 * len(COUNTS) * len(PAIRS) and REPORT["places"] >= 200
    for row in rows:
        assert 0 < row["acceptance"] <= row["optimum"] + 3 * row["error"] + 1e-6, row


def test_the_page_says_what_the_report_does():
    page = (HERE / "README.md").read_text()
    assert written(page, REPORT) == page, "run experiments/acceptance/measure.py"
    assert page.count("| `k_seq` |") == 3


def test_where_two_lines_cross_is_said_by_their_error():
    row = lambda children, gap: {"children": children, "difference": gap, "error": 0.01}
    said = "behind at k = 1; ahead at k = 8; no difference of two standard errors at k = 2, 4"
    assert crossed([row(1, -0.03), row(2, -0.019), row(4, 0.01), row(8, 0.03)]) == said
