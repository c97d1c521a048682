"""RAPID's rule: the published numbers, every draft, random trees by hand, and the ordinary rule where nothing moves."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, same
from support.judging import V, cases, down

from specjax.assembly import registry
from specjax.verify import RapidTransfer, Recursive

P = np.exp([2.0, 1.0, 0.0]) / np.exp([2.0, 1.0, 0.0]).sum()
Q = np.array([0.2, 0.7, 0.1])


def moved(p, q, eta, alpha=0.1):
    with np.errstate(divide="ignore"):
        scores = np.log(p) - eta * np.where(q >= alpha * q.max(), p - q, 0)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def left_over(p, q, eta):
    over = np.maximum(np.maximum(p - q, p - moved(p, q, eta)), 0)
    return over / over.sum() if over.sum() > 1e-6 else p


def state_of(rule, p, q):
    return rule.enter(jnp.asarray(p)[None], jnp.log(jnp.asarray(q))[None], jnp.asarray([1]))


def test_numbers_of_the_published_code():
    """What the released function gives for these logits and this draft, at eta 10 (run once, beside these tests)."""
    rule = RapidTransfer(10.0)
    state = state_of(rule, P, Q)
    np.testing.assert_allclose(rule.moved(*state)[0], [0.000272, 0.995464, 0.004264], atol=1e-6)
    np.testing.assert_allclose([rule.chance(state, jnp.asarray([i]))[0] for i in range(3)], [0.00136, 1, 0.04264], 1e-3)
    np.testing.assert_allclose(rule.rejected(state, jnp.asarray([0]))[0][0], [0.885757, 0, 0.114243], atol=2e-6)
    unlikely = np.array([0.05, 0.9, 0.05])  # below a tenth of the largest: only the middle one moves
    ratio = np.asarray(rule.moved(*state_of(rule, P, unlikely)))[0] / P
    assert ratio[0] == pytest.approx(ratio[2], rel=1e-5) and ratio[1] > 100 * ratio[0]


def test_every_draft():
    """A token's distribution is min(q, p'), and the rest from the residual: neither p nor p'."""
    rule = RapidTransfer(10.0)
    state, total = state_of(rule, P, Q), np.zeros(3)
    for token in range(3):
        drafted = jnp.asarray([token])
        chance, rest = float(rule.chance(state, drafted)[0]), np.asarray(rule.rest(rule.rejected(state, drafted)))[0]
        total += Q[token] * (chance * np.eye(3)[token] + (1 - chance) * rest)
    other = moved(P, Q, 10.0)
    stays = np.minimum(Q, other)
    np.testing.assert_allclose(total, stays + (1 - stays.sum()) * left_over(P, Q, 10.0), atol=1e-6)
    assert min(np.abs(total - P).max(), np.abs(total - other).max()) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [True, False])
def test_by_hand(drawn):
    differ = []
    for found, case in cases(RapidTransfer(5.0), drawn=drawn):
        case = {**case, "p": np.eye(V)[case["p"].argmax(axis=1)]} if case["greedy"] else case

        def by_hand(eta, case=case):
            own = lambda q, token: np.eye(V)[token] if q is None else q
            chance = lambda left, first, q, token: moved(left, own(q, token), eta)[token] / own(q, token)[token]
            residual = lambda left, q, token: left_over(left, own(q, token), eta)
            depth, node, left = down(case, chance, residual)
            with np.errstate(divide="ignore"):
                return depth, node, np.argmax(np.log(left) + case["noise"][depth])

        assert found == by_hand(5.0)
        assert not case["greedy"] or found == by_hand(0.0)  # greedy rows keep greedy text
        differ.append(by_hand(0.0) != found)
    assert sum(differ) >= 3


@pytest.mark.slow
def test_without_eta_it_is_the_ordinary_rule():
    same(*(complete(DRAFTERS["draft-chain"], MIXED, rule)[0] for rule in (RapidTransfer(0.0), Recursive())))


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["rapid"].guarantee == "lossy" and RapidTransfer.keeps_greedy
    assert registry.make_verifier("rapid:eta=10,alpha=0.2") == RapidTransfer(10.0, 0.2)
    for bad in ({"eta": -1.0}, {"eta": float("inf")}, {"eta": float("nan")}, {"alpha": 1.1}):
        with pytest.raises(ValueError, match=r"rapid needs a finite eta >= 0 and alpha in \[0, 1\]"):
            RapidTransfer(**bad)
