"""Grades in place of tokens: they keep the distribution, lose no acceptance, and nothing of a vocabulary's size is
sorted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.reference import statistics
from specjax.verify import Optimal, grades
from specjax.verify.bounds import optimal_acceptance
from specjax.verify.optimal import line_of

V, K = 24, 3
"""More tokens than there are grades, and few enough to count."""


def pair(seed=0, vocab=V, spread=0.3):
    p, q = np.random.default_rng(seed).dirichlet(np.full(vocab, spread), 2)
    return p, q


def far(vocab=V):
    """A draft that is sure of what the target finds unlikely, with tokens that one of them never says."""
    p, q = pair(3, vocab, 0.1)
    p[:3], q[3:6] = 0.0, 0.0
    return p / p.sum(), q / q.sum()


DISTRIBUTIONS = {"near": pair(1, spread=3.0), "random": pair(), "far": far(), "equal": (pair()[0],) * 2}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("k", (1, 2, 5))
def test_a_rule_for_grades_keeps_the_distribution_of_tokens(name, k):
    """In closed form: a child's grade is as likely as the distribution over grades says, a token's p / q is that of its
    grades in the mean, and what passes of tokens is what passes of their grades."""
    p, q = DISTRIBUTIONS[name]
    with jax.enable_x64(True):
        wide, drafts = [jnp.asarray(x)[None] for x in (p, q)], jnp.full(1, float(k))
        made = grades.grades_of(*wide, drafts)
        line = line_of(made.p, made.q, drafts)
        shares = line.kept[:, :-1] / jnp.maximum(made.q[:, :-1], grades.NARROW)
        kept = np.asarray(grades.over_tokens(made, shares, *wide))[0]
        parts = np.stack([np.asarray(part)[0] for part in grades._parts(made.edges, *wide)])
    assert made.p.shape == made.q.shape == (1, grades.COUNT) and (np.diff(made.edges[0]) >= 0).all()
    above = np.concatenate([q[None], parts, np.zeros((1, V))])
    own = above[:-1] - above[1:]  # of every token what has each grade
    assert own.min() > -1e-15
    np.testing.assert_allclose(own.sum(axis=1), made.q[0, :-1], atol=1e-12)
    np.testing.assert_allclose(np.asarray(made.edges)[0] @ own, np.minimum(p, k * q), atol=1e-9)
    np.testing.assert_allclose(np.asarray(made.p)[0].sum(), 1, atol=1e-9)
    np.testing.assert_allclose(np.asarray(shares)[0] @ own, kept, atol=1e-12)
    assert (kept <= p + 1e-12).all()
    assert kept.sum() == pytest.approx(optimal_acceptance(p, q, k, replacement=True), abs=2e-6)


@pytest.mark.slow
def test_a_grade_is_drawn_with_its_chance():
    p, q = (jnp.asarray(x, jnp.float32)[None] for x in DISTRIBUTIONS["random"])
    made = grades.grades_of(p, q, jnp.full(1, float(K)))
    even = (np.arange(1000) + 0.5) / 1000
    found = jax.vmap(lambda u: grades.grade(made, p, q, jnp.full(p.shape, u)))(jnp.asarray(even, jnp.float32))[:, 0]
    chances = (np.asarray(found)[..., None] == np.arange(grades.COUNT)).mean(axis=0)  # [V, COUNT]
    np.testing.assert_allclose(np.asarray(q)[0] @ chances, made.q[0], atol=2e-3)
    never = grades.grade(made, jnp.ones((1, 1)), jnp.zeros((1, 1)), jnp.full((1, 1), 0.5))
    assert int(never[0, 0]) == grades.COUNT - 1  # of greedy rows, whose children are no draws


@pytest.mark.parametrize(("vocab", "scale", "noise"), ((32768, 3.0, 0.7), (32768, 1.5, 0.5), (4000, 4.0, 2.0)))
def test_many_tokens_in_float32(vocab, scale, noise):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=vocab) * scale
    dists = [np.asarray(jax.nn.softmax(jnp.asarray(x))) for x in (logits, logits + noise * rng.normal(size=vocab))]
    p, q = (jnp.asarray(dist)[None] for dist in dists)
    for k in (1, 2, 8):
        made = grades.grades_of(p, q, jnp.full(1, float(k)))
        line = line_of(made.p, made.q, jnp.full(1, float(k)))
        kept = grades.over_tokens(made, line.kept[:, :-1] / jnp.maximum(made.q[:, :-1], grades.NARROW), p, q)
        assert float((kept - p).max()) < 1e-7
        most = optimal_acceptance(dists[0] / dists[0].sum(), dists[1] / dists[1].sum(), k, replacement=True)
        assert float(kept.sum()) == pytest.approx(most, abs=5e-6)


ROWS = 100_000


@jax.jit
def texts(p, q, key):
    """Of so many rows the token that is kept or drawn, and whether it is a child."""
    wide = lambda dist: jnp.broadcast_to(dist, (ROWS, len(dist)))
    own, noise, coins, last = jax.random.split(key, 4)
    tokens = jax.random.categorical(own, jnp.log(q), shape=(ROWS, K))
    rule = Optimal()
    state = rule.enter(wide(p), jnp.log(wide(q)), jnp.full(ROWS, K))
    state = rule.compare(state, tokens, jnp.ones(tokens.shape, bool), jax.random.uniform(noise, (*tokens.shape, 3)))
    passes = jax.random.uniform(coins, (ROWS,)) < state.chance
    return jnp.where(passes, state.token, jax.random.categorical(last, jnp.log(rule.rest(state)))), passes


def counted(p, q, seed=0):
    tokens, passes = texts(*(jnp.asarray(x, jnp.float32) for x in (p, q)), jax.random.key(seed))
    return np.bincount(np.asarray(tokens), minlength=len(p)), float(passes.mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", ("random", "far"))
def test_by_counting(name):
    """The whole rule at a node: the distribution of 100,000 tokens by chi-square, and as many children pass as can."""
    p, q = DISTRIBUTIONS[name]
    counts, rate = counted(p, q)
    assert counts[p == 0].sum() == 0
    assert statistics.chi_square(counts[p > 0], p[p > 0] / p[p > 0].sum()) > 1e-3
    most = optimal_acceptance(p, q, K, replacement=True)
    assert abs(rate - most) < 4 * np.sqrt(most * (1 - most) / ROWS)


@pytest.mark.slow
def test_counting_finds_a_fault(monkeypatch):
    """Where tokens always have the grade below their p / q, the distribution is another."""
    p, q = DISTRIBUTIONS["random"]
    texts.clear_cache()
    lower = grades.grade
    monkeypatch.setattr(
        "specjax.verify.optimal.grade", lambda made, p, q, u: lower(made, p, q, jnp.full(u.shape, 0.999))
    )
    counts, _ = counted(p, q)
    texts.clear_cache()
    assert statistics.chi_square(counts, p) < 1e-6


def test_nothing_of_the_vocabularys_size_is_sorted():
    """Nor summed up in turn, nor gone through in a loop."""
    size = 5000
    rule = Optimal()

    def node(p, log_q, tokens, noise):
        return rule.compare(rule.enter(p, log_q, jnp.full(1, K)), tokens, tokens >= 0, noise)

    dists, children = jnp.full((1, size), 1 / size), jnp.arange(4)[None]
    program = str(jax.make_jaxpr(node)(dists, jnp.log(dists), children, jnp.zeros((1, 4, 3))))
    dear = [line for line in program.splitlines() if re.search(r"= (sort|cumsum|top_k|while|scan|scatter)", line)]
    assert dear and not any(str(size) in line for line in dear)
