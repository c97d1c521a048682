"""LANTERN against its definition by hand, its bound by enumeration, and without a bound the ordinary rule."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, DRAFTERS, MIXED, TARGET, complete, mostly_slow, params, same
from support.judging import V, cases, down, judge, ordinary

from specjax.spec import registry
from specjax.verify import Lantern, Recursive
from specjax.verify.lantern import nearest

TABLE = np.random.default_rng(4).normal(size=(V, 3))


def near(table, count):
    """Of every row its nearest ones, by sorting all distances."""
    distances = ((table[:, None] - table[None]) ** 2).sum(-1)
    return np.array([[other for other in np.argsort(row) if other != own][:count] for own, row in enumerate(distances)])


def pooled(law, token, table, bound):
    best = total = 0.0
    for other in table[token]:
        total += law[other]
        best = total if total <= bound else best
    return best


def chance_of(table, bound, greedy):
    def chance(left, first, q, token):
        together = left[token] + pooled(left, token, table, bound)
        if greedy:
            return float(token == first.argmax() or together > first.max())
        return together / (1 if q is None else q[token]) if left[token] > 0 else 0

    return chance


def by_hand(case, table, bound):
    greedy = case["greedy"]
    residual = (lambda left, q, token: left) if greedy else ordinary
    depth, node, left = down(case, chance_of(table, bound, greedy), residual)
    with np.errstate(divide="ignore"):
        return depth, node, left.argmax() if greedy else np.argmax(np.log(left) + case["noise"][depth])


@pytest.mark.parametrize("drawn", [True, False])
def test_by_hand(drawn):
    table, differ = near(TABLE, 4), []
    for found, case in cases(Lantern(4, 0.4), drawn=drawn, params={"nearest": jnp.asarray(table)}):
        assert found == by_hand(case, table, 0.4)
        differ.append((by_hand(case, table[::-1], 0.4) != found, case["greedy"]))  # the neighbours of others are seen
    assert sum(other for other, _ in differ) >= 3 and any(other and greedy for other, greedy in differ)


def test_no_token_comes_more_often_than_the_bound_allows():
    """The law of a node with one child, by enumeration of the rule that the test above holds the code to."""
    rng, most = np.random.default_rng(1), []
    for bound in (0.0, 0.1, 0.3):
        for _ in range(50):
            (p, q), table = rng.dirichlet(np.full(V, 0.5), 2), near(rng.normal(size=(V, 3)), 3)
            passes = np.array([min(chance_of(table, bound, False)(p, p, q, x), 1) for x in range(V)])
            law = q * passes + (q * (1 - passes)).sum() * ordinary(p, q, 0)
            assert law.sum() == pytest.approx(1) and (law - p).max() <= bound + 1e-9
            most.append((law - p).max() / bound if bound else 0)
    assert max(most) > 0.5


def test_the_nearest_tokens():
    table = np.random.default_rng(2).normal(size=(300, 8)).astype(np.float32)
    assert nearest(jnp.asarray(table), 5).tolist() == near(table.astype(np.float64), 5).tolist()


@pytest.mark.parametrize("name", mostly_slow(["draft-iid", "prompt_lookup"], "prompt_lookup"))
def test_a_bound_of_zero_is_the_ordinary_rule_and_more_is_not(name):
    wanted, strict = complete(DRAFTERS[name], MIXED, Recursive())
    same(complete(DRAFTERS[name], MIXED, Lantern(bound=0.0))[0], wanted)
    got, loose = complete(DRAFTERS[name], MIXED, Lantern(bound=0.9))
    assert got != wanted and np.sum(loose.stats.steps) < np.sum(strict.stats.steps)


def test_it_is_built_for_a_target():
    model = SimpleNamespace(lm=TARGET, params=params()["target"], abstract=False)
    verifier, own = registry.build_verifier("lantern:neighbours=4", model)
    assert verifier == Lantern(4, target=TARGET) and own["nearest"].shape == (CONFIG.vocab_size, 4)
    shapes = jax.eval_shape(lambda: model.params)
    described = registry.build_verifier(verifier, SimpleNamespace(lm=TARGET, params=shapes, abstract=True))[1]
    assert described["nearest"].shape == own["nearest"].shape and described["nearest"].dtype == own["nearest"].dtype
    assert registry.build_verifier("coupled", model)[1] is None
    with pytest.raises(ValueError, match="lantern pools 96 of 96 tokens"):
        registry.build_verifier(dataclasses.replace(verifier, neighbours=96), model)


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["lantern"].guarantee == "lossy" and not Lantern.keeps_greedy
    for fields in ({"neighbours": 0}, {"bound": 1.5}):
        with pytest.raises(ValueError, match="lantern needs at least one neighbour and a bound"):
            Lantern(**fields)
    with pytest.raises(ValueError, match=r'params\["verify"\] = verifier.bind'):
        judge(Lantern(), jnp.zeros((32, 10), jnp.int32), jnp.zeros((32, 10, V)), jax.random.key(0))
