"""The judge by divergence: every draft enumerated, random trees by hand, and the ordinary rule where it never is loose."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, same
from support.judging import V, cases, down, ordinary

from specjax.assembly import registry
from specjax.verify import KLJudge, Recursive

P = np.array([[0.5, 0.3, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0], [0.92, 0.05, 0.02, 0.01], [0.1, 0.2, 0.3, 0.4]])
Q = np.array([[0.3, 0.4, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.88, 0.07, 0.03, 0.02], [0.0, 0.3, 0.3, 0.4]])
"""Near each other; far apart; near each other where the target is sure; apart, since q rules out a token of p."""


def divergence(p, q):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log(p / q), 0).sum(axis=-1)


def after_one_draft(rule, p, q):
    """The distribution `[V]` of the first token, summed over every draft and whether it passes."""
    state = rule.enter(jnp.asarray(p)[None], jnp.log(jnp.asarray(q))[None], jnp.asarray([1]))
    total = np.zeros(len(p))
    for token in range(len(p)):
        drafted = jnp.asarray([token])
        chance = float(rule.chance(state, drafted)[0])
        rest = np.asarray(rule.rest(rule.rejected(state, drafted)))[0]
        total += q[token] * (chance * np.eye(len(p))[token] + (1 - chance) * rest / rest.sum())
    return total


def test_every_draft():
    """Loose: the draft's distribution, but what p rules out is drawn from the residual. Elsewhere the target's."""
    assert [divergence(p, q) < 0.2 for p, q in zip(P, Q, strict=True)] == [True, False, True, False]
    found = [after_one_draft(KLJudge(), p, q) for p, q in zip(P, Q, strict=True)]
    over = np.maximum(P[0] - Q[0], 0)
    loose = np.where(P[0] > 0, Q[0], 0) + 0.1 * over / over.sum()
    np.testing.assert_allclose(found, [loose, *P[1:]], atol=1e-6)
    assert np.abs(loose - P[0]).max() > 0.05
    near = np.array([0.45, 0.35, 0.2, 0.0])
    np.testing.assert_allclose(after_one_draft(KLJudge(), P[0], near), near, atol=1e-6)
    np.testing.assert_allclose(after_one_draft(KLJudge(sure=0.4), P[0], near), P[0], atol=1e-6)
    np.testing.assert_allclose(after_one_draft(KLJudge(sure=1.0), P[2], Q[2]), Q[2], atol=1e-6)
    np.testing.assert_allclose(after_one_draft(KLJudge(5.0), P[1], Q[1]), [0.42, 0.28, 0.3, 0], atol=1e-6)


@pytest.mark.slow
def test_by_hand():
    differ = []
    for found, case in cases(KLJudge(0.5), drawn=True):
        case = {**case, "p": np.eye(V)[case["p"].argmax(axis=1)]} if case["greedy"] else case

        def by_hand(threshold, case=case):
            def chance(left, first, q, token):
                if divergence(first, q) <= threshold and first.max() <= 0.9:
                    return left[token] > 0
                return left[token] / q[token]

            depth, node, left = down(case, chance, ordinary)
            with np.errstate(divide="ignore"):
                return depth, node, np.argmax(np.log(left) + case["noise"][depth])

        assert found == by_hand(0.5)
        differ.append(by_hand(-1.0) != found)
    assert sum(differ) >= 3


def test_what_was_not_drawn_gets_the_ordinary_test():
    """Greedy or not, the verdicts of `Recursive`."""
    for (found, _), (wanted, _) in zip(cases(KLJudge(9.0), 1), cases(Recursive(), 1), strict=True):
        assert found == wanted


@pytest.mark.slow
def test_never_loose_it_is_the_ordinary_rule():
    same(*(complete(DRAFTERS["draft-chain"], MIXED, rule)[0] for rule in (KLJudge(-1.0), Recursive())))


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["kl_judge"].guarantee == "lossy" and KLJudge.keeps_greedy
    assert registry.make_verifier("kl_judge:threshold=0.5,sure=0.8") == KLJudge(0.5, 0.8)
    for bad in ({"threshold": float("nan")}, {"sure": 1.1}):
        with pytest.raises(ValueError, match="kl_judge needs a finite threshold and sure in"):
            KLJudge(**bad)
