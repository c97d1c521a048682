"""The sampler: the distribution of its draws, what it does with broken logits, and what a cheap batch does not pay
for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.reference import statistics
from specjax.reference import warpers as oracle
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import Topology, Tree

draw = jax.jit(lambda sampler, logits: sampler.draw(logits, 0))


def make(rows, lengths=3, live=True, seed=0, **options):
    return Sampler(
        jax.random.split(jax.random.key(seed), rows),
        jnp.zeros((rows, 8), jnp.int32),
        jnp.full((rows,), lengths),
        jnp.full((rows,), live),
        SamplingArrays.make(rows, **options),
    )


DISTRIBUTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.6, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.25},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.5},
]
EACH, ALPHA = 30_000, 1e-3


def test_draws_follow_the_warped_distribution_detects_tv_002_with_power_099():
    """30,000 draws of 8 tokens a distribution: total variation 0.02 fails the chi-square at 1e-3 with probability >
    0.99."""
    assert statistics.power(EACH, 8, 0.02, ALPHA) > 0.99
    logits = np.random.default_rng(0).normal(size=8).astype(np.float32) * 1.5
    options = {
        name: np.repeat([dist.get(name, default) for dist in DISTRIBUTIONS], EACH)
        for name, default in (("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1))
    }
    rows = EACH * len(DISTRIBUTIONS)
    tokens = np.asarray(draw(make(rows, **options), jnp.broadcast_to(jnp.asarray(logits), (rows, 1, 8))))
    for dist, own in zip(DISTRIBUTIONS, tokens.reshape(len(DISTRIBUTIONS), EACH), strict=True):
        scores = oracle.repetition_penalty(logits, [0], dist.get("repetition_penalty", 1.0))
        scores = oracle.warp(
            scores, dist["temperature"], dist.get("top_k", 0), dist.get("top_p", 1.0), dist.get("min_p", 0.0)
        )
        counts = np.bincount(own, minlength=8)
        assert statistics.chi_square(counts, oracle.softmax(scores)) > ALPHA, dist
        shifted = np.roll(oracle.softmax(scores), 1)
        assert statistics.chi_square(counts, shifted) < ALPHA  # the check can fail


BROKEN = {
    "nan": np.full(8, np.nan),
    "one_nan": np.array([0, 1, np.nan, 3, 0, 1, 2, 3.0]),
    "nothing": np.full(8, -np.inf),
    "inf": np.array([0, np.inf, 0, 0, 0, 0, 0, 0.0]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_logits_fail_their_row_alone(kind):
    good = np.random.default_rng(0).normal(size=8)
    logits = jnp.asarray(np.stack([good, BROKEN[kind], good, good]), jnp.float32)[:, None]
    fine = jnp.asarray(np.stack([good] * 4), jnp.float32)[:, None]
    for options in (
        {},
        {"temperature": 1.0},
        {"temperature": [0, 1, 1, 0]},
        {"temperature": [1, 0, 1, 1]},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.9},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 0.5, "min_p": 0.1},
        {"temperature": [0, 0, 1, 1], "repetition_penalty": 1.2},
    ):
        sampler = make(4, **options)
        got, want = np.asarray(draw(sampler, logits))[:, 0], np.asarray(draw(sampler, fine))[:, 0]
        assert got[1] == -1 and (want >= 0).all(), options
        np.testing.assert_array_equal(got[[0, 2, 3]], want[[0, 2, 3]])


def test_a_finite_maximum_is_enough():
    logits = jnp.full((2, 1, 8), -jnp.inf).at[:, 0, 5].set(-3.0)
    assert draw(make(2, temperature=[0.0, 1.0]), logits).tolist() == [[5], [5]]


def test_greedy_ties_go_to_the_lowest_id():
    assert draw(make(1), jnp.zeros((1, 1, 8)).at[0, 0, 3:5].set(1.0)).tolist() == [[3]]


def test_log_distribution():
    logits = np.random.default_rng(4).normal(size=(3, 1, 8)).astype(np.float32)
    got = np.asarray(make(3, temperature=[0, 1, 0.5], top_k=[0, 3, 0]).log_probs(jnp.asarray(logits)))[:, 0]
    np.testing.assert_array_equal(np.exp(got[0]), np.eye(8)[logits[0, 0].argmax()])
    np.testing.assert_allclose(np.exp(got[1]), oracle.softmax(oracle.warp(logits[1, 0], 1.0, 3)), atol=1e-6)
    np.testing.assert_allclose(np.exp(got[2]), oracle.softmax(oracle.warp(logits[2, 0], 0.5)), atol=1e-6)


def test_scores_of_a_few_candidates_are_those_among_all():
    logits = np.random.default_rng(5).normal(size=(4, 2, 30)).astype(np.float32)
    log_q = jax.nn.log_softmax(jnp.asarray(logits))
    ids = jnp.asarray(np.argsort(np.random.default_rng(6).random((4, 2, 30)), axis=2)[:, :, :5])
    few = jnp.take_along_axis(log_q, ids, axis=2).at[:, :, 4].set(-jnp.inf)
    for temperature in ([0.0, 1.0, 0.5, 2.0], 0.0):
        sampler = make(4, temperature=temperature)
        got = jax.jit(lambda s, q, i: s.scores_at(q, i, 3))(sampler, few, ids.at[:, :, 4].set(-1))
        want = jnp.take_along_axis(sampler.scores(log_q, 3), ids, axis=2)
        np.testing.assert_allclose(got[:, :, :4], want[:, :, :4], rtol=1e-5, atol=1e-6)
        assert (got[:, :, 4] == -jnp.inf).all()


# ---- what is paid for -----------------------------------------------------------------------------------------------

# random words become floats by a bit cast: that is where noise is made
COSTLY = {"sort", "scan", "top_k", "bitcast_convert_type", "random_bits", "threefry2x32", "random_fold_in", "scatter"}


def equations(jaxpr, under=()):
    """Every equation with the `cond` branches it lies in, outermost first."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, under
        for name, value in equation.params.items():
            for i, inner in enumerate(value if isinstance(value, (tuple, list)) else [value]):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    branch = (i,) if equation.primitive.name == "cond" and name == "branches" else ()
                    yield from equations(inner, under + branch)


def program():
    tree = Tree.of(Topology.from_counts("2 | 1"), jnp.ones((2, 4), int), jnp.ones((2, 4), bool))

    def step(sampler, logits):
        return sampler.draw(logits, tree.depth, tree.path_tokens, tree.max_depth)

    return step, (make(2), jnp.zeros((2, 4, 500)))


def test_searches_and_noise_lie_under_cond():
    step, arguments = program()
    found = [x for x in equations(jax.make_jaxpr(step)(*arguments).jaxpr) if x[0] in COSTLY]
    names = {name for name, _ in found}
    assert {"scan", "top_k", "bitcast_convert_type", "scatter"} <= names and "sort" not in names
    # branch 0 is the false one: a greedy batch without a penalty takes it, and finds nothing costly there
    assert all(under and under[0] == 1 for _, under in found)
    # a penalty alone: the second cond is the noise; its false branch holds the penalty's scatter and nothing else
    assert {name for name, under in found if under[1] == 0} == {"scatter"}
    depth = {name: min(len(under) for other, under in found if other == name) for name, _ in found}
    # noise; a filter is on; a long tail
    assert depth["bitcast_convert_type"] == 2 and depth["top_k"] == 3 and depth["scan"] == 4


def costly_in_entry(function, *arguments):
    """Whether the compiled program sorts, ranks or calls out unconditionally."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    entry = re.search(r"^ENTRY .*?^\}", text, re.MULTILINE | re.DOTALL).group()
    entry = re.sub(r"metadata=\{[^}]*\}", "", entry)
    return re.search(r"\b(sort|topk|custom-call)\(", entry) is not None, "conditional(" in entry


def test_compiled_entry_holds_no_sort():
    step, arguments = program()
    assert costly_in_entry(step, *arguments) == (False, True)
    assert costly_in_entry(jnp.sort, arguments[1]) == (True, False)  # the check sees what it looks for
    assert costly_in_entry(lambda x: jax.lax.top_k(x, 8), arguments[1]) == (True, False)
