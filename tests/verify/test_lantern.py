"""LANTERN against its definition by hand, its bound by enumeration, and without a bound the ordinary rule."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, DRAFTERS, MIXED, TARGET, but_slow, complete, params, same
from support.judging import V, cases, down, judge, ordinary

from specjax.assembly import registry
from specjax.verify import Lantern, Recursive
from specjax.verify.lantern import _Pooling, nearest

TABLE = np.random.default_rng(4).normal(size=(V, 3))


def near(table, count):
    """Of every row its nearest ones, by sorting all distances."""
    distances = ((table[:, None] - table[None]) ** 2).sum(-1)
    return np.array([[other for other in np.argsort(row) if other != own][:count] for own, row in enumerate(distances)])


def pooled(dist, token, table, bound, count):
    """What the nearest have together within the bound, and whether any do."""
    limit = bound if bound <= 1 else (bound - 1) * dist[token]
    best, total, some = 0.0, 0.0, False
    for place, other in enumerate(table[token][:count]):
        total += dist[other]
        if total <= limit:
            best, some = total, some or place == 0
    return best, some


def by_hand(case, table, bound, count):
    greedy = case["greedy"]

    def chance(left, first, q, token):
        together = left[token] + pooled(left, token, table, bound, count)[0]
        if greedy:
            raised = first.copy()
            raised[token] = together
            return float(raised.argmax() == token)
        return together / (1 if q is None else q[token]) if left[token] > 0 else 0

    def residual(left, q, token):
        near = list(table[token][: count + 1]) if pooled(left, token, table, bound, count)[1] else []
        if greedy:
            return left
        if q is not None:
            return ordinary(left, np.where(np.isin(np.arange(V), near), 0, q), token)
        others = np.where(np.isin(np.arange(V), [token, *near]), 0, left)
        return others / others.sum() if others.sum() > 1e-6 else ordinary(left, None, token)

    depth, node, left = down(case, chance, residual)
    with np.errstate(divide="ignore"):
        return depth, node, left.argmax() if greedy else np.argmax(np.log(left) + case["noise"][depth])


@pytest.mark.parametrize(("drawn", "bound"), [(True, 0.4), (False, 0.4), (True, 2.5)])
def test_by_hand(drawn, bound):
    table, differ = near(TABLE, 4), []
    for found, case in cases(Lantern(3, bound), drawn=drawn, params={"nearest": jnp.asarray(table)}):
        assert found == by_hand(case, table, bound, 3)
        differ.append(
            (by_hand(case, table[::-1], bound, 3) != found, case["greedy"])
        )  # the neighbours of others are seen
    assert sum(other for other, _ in differ) >= 3 and any(other and greedy for other, greedy in differ)


P = np.float32([[0.30, 0.20, 0.15, 0.10, 0.10, 0.08, 0.05, 0.02]])
Q = np.float32([[0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.1]])
NEAREST = jnp.zeros((8, 5), jnp.int32).at[6].set(jnp.asarray([5, 7, 4, 3, 2]))  # they have .08 .10 .20 .30 .45 together


@pytest.mark.parametrize(
    ("bound", "together"),
    [(0.05, 0.05), (0.11, 0.15), (0.15, 0.15), (0.21, 0.25), (2.0, 0.05), (3.1, 0.15), (5.1, 0.25), (0.0, 0.05)],
)
def test_chances_are_the_released_codes(bound, together):
    """Of token 6, whose own chance is 0.05, in the distribution P; above 1 a bound is LANTERN++'s."""
    rule = _Pooling(NEAREST, 5, bound, jnp.zeros(1, bool))
    assert float(rule.chance((P, Q, P), jnp.asarray([6]))[0]) == pytest.approx(min(together / 0.2, 1), abs=1e-6)


@pytest.mark.parametrize(
    ("bound", "drawn", "left"),
    [
        (0.15, True, [0.3077, 0.1538, 0.0769, 0.1538, 0.1538, 0.1231, 0, 0.0308]),
        (0.05, True, [0.5714, 0.2857, 0.1429, 0, 0, 0, 0, 0]),  # nothing is pooled
        (0.15, False, [0.4615, 0.3077, 0.2308, 0, 0, 0, 0, 0]),
        (0.05, False, [0.3158, 0.2105, 0.1579, 0.1053, 0.1053, 0.0842, 0, 0.0211]),
    ],
)
def test_what_a_rejected_token_leaves_is_the_released_codes(bound, drawn, left):
    """With three neighbours, of which two are pooled at most: four have no part in q then, or none in the distribution
    that is left."""
    rule = _Pooling(NEAREST[:, :4], 3, bound, jnp.zeros(1, bool))
    after = rule.rejected((P, Q if drawn else None, P), jnp.asarray([6]))[0]
    np.testing.assert_allclose(after[0], left, atol=5e-5)


def test_the_nearest_tokens():
    table = np.random.default_rng(2).normal(size=(300, 8)).astype(np.float32)
    assert nearest(jnp.asarray(table), 5).tolist() == near(table.astype(np.float64), 5).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", but_slow(["draft-iid", "prompt_lookup"], "draft-iid"))
def test_a_bound_of_zero_is_the_ordinary_rule(name):
    same(*(complete(DRAFTERS[name], MIXED, rule)[0] for rule in (Lantern(bound=0.0), Recursive())))


def test_it_is_built_for_a_target():
    model = SimpleNamespace(lm=TARGET, params=params()["target"], abstract=False)
    verifier, own = registry.build_verifier("lantern:neighbours=4", model)
    assert verifier == Lantern(4, target=TARGET) and own["nearest"].shape == (CONFIG.vocab_size, 5)
    every = registry.build_verifier(f"lantern:neighbours={CONFIG.vocab_size - 1}", model)[1]
    assert every["nearest"].shape == (CONFIG.vocab_size, CONFIG.vocab_size - 1)
    shapes = jax.eval_shape(lambda: model.params)
    described = registry.build_verifier(verifier, SimpleNamespace(lm=TARGET, params=shapes, abstract=True))[1]
    assert described["nearest"].shape == own["nearest"].shape and described["nearest"].dtype == own["nearest"].dtype
    assert registry.build_verifier("coupled", model)[1] is None
    with pytest.raises(ValueError, match="lantern pools 96 of 96 tokens"):
        registry.build_verifier(dataclasses.replace(verifier, neighbours=96), model)


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["lantern"].guarantee == "lossy" and not Lantern.keeps_greedy
    assert registry.make_verifier("lantern:preset=paper") == Lantern(1000, 0.1)
    for fields in ({"neighbours": 0}, {"bound": -0.5}, {"bound": float("inf")}):
        with pytest.raises(ValueError, match="lantern needs at least one neighbour and a bound"):
            Lantern(**fields)
    with pytest.raises(ValueError, match=r'params\["verify"\] = verifier.bind'):
        judge(Lantern(), jnp.zeros((32, 10), jnp.int32), jnp.zeros((32, 10, V)), jax.random.key(0))
