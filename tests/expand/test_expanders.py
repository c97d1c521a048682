"""Expanders against their oracles, driven by laws that are a fixed random function of a node's path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from specjax.expand import Chain, EarlyStop, Static, TopK
from specjax.reference import expand as oracle
from specjax.reference import trees, warpers
from specjax.sampling import Sampler, Sampling
from specjax.sampling.noise import gumbel

V, B, DEEPEST = 6, 3, 4
WEIGHTS = (V + 1) ** np.arange(DEEPEST)  # a path (t1, t2, ...) is the number sum (t_d + 1) (V + 1)^(d - 1)
TEXT = np.array([[1, 2, 3, 0, 0, 0, 0, 0], [5, 5, 1, 2, 0, 4, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0]])
LENGTHS = np.array([3, 6, 1])
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": [1.0, 0.6, 1.5]},
    "mixed": {"temperature": [0.0, 1.0, 0.7], "top_k": [0, 3, 2], "repetition_penalty": [1.5, 0.7, 1.0]},
    "narrow": {"temperature": 1.0, "top_k": [1, 2, 2]},
}


def table(seed):
    """Logits `[B, paths, V]` after every path."""
    return np.random.default_rng(seed).normal(size=(B, WEIGHTS.sum() * V + 1, V)).astype(np.float32) * 2


def make_grow(laws):
    """A drafter whose law is looked up by path. The path is read twice, through `parent` and through `visible`; where
    the two disagree the logits are NaN."""

    def grow(carry, level):
        tokens, depths, codes = carry
        rows, width = level.tokens.shape
        own = (level.tokens + 1) * int(WEIGHTS[level.depth - 1])
        above = jnp.concatenate([jnp.zeros((rows, 1), own.dtype), codes], axis=1)
        code = jnp.take_along_axis(above, level.parent + 1, axis=1) + own
        tokens = jnp.concatenate([tokens, level.tokens], axis=1)
        depths = (*depths, *[level.depth] * width)
        worth = (tokens + 1) * jnp.asarray(WEIGHTS)[jnp.asarray(depths) - 1][None]
        assert level.visible.shape[1:] == (width, tokens.shape[1])
        seen = jnp.where(level.visible, worth[:, None], 0).sum(axis=2)
        logits = jnp.take_along_axis(laws, code[:, :, None], axis=1)
        return (tokens, depths, jnp.concatenate([codes, code], axis=1)), jnp.where(
            (code == seen)[..., None], logits, jnp.nan
        )

    return grow


@functools.partial(jax.jit, static_argnames=("expander", "keep_q"))
def expand(expander, laws, sampler, keep_q=False):
    empty = jnp.zeros((B, 0), jnp.int32)
    root = jnp.asarray(TEXT[np.arange(B), LENGTHS - 1], jnp.int32)
    return expander(root, laws[:, 0], make_grow(laws), (empty, (), empty), sampler, keep_q=keep_q)


def sampler_of(name):
    return Sampler(
        jax.random.split(jax.random.key(3), B),
        jnp.asarray(TEXT),
        jnp.asarray(LENGTHS),
        jnp.ones(B, bool),
        Sampling.make(B, **SETTINGS[name]),
    )


NOISE = np.asarray(
    gumbel(sampler_of("greedy").key, jnp.asarray(LENGTHS)[:, None] + jnp.arange(DEEPEST)[None], V), np.float64
)


def by_hand(laws, row, name, coupled, tau=1.0):
    """The row's `score` for the oracles: penalty over text and path, warpers, and the depth's noise if coupled."""
    option = {key: np.broadcast_to(value, B)[row] for key, value in SETTINGS[name].items()}
    heat = option.get("temperature", 0.0)

    def score(path):
        code = sum((token + 1) * WEIGHTS[depth] for depth, token in enumerate(path))
        seen = [*TEXT[row, : LENGTHS[row]], *path]
        scores = warpers.repetition_penalty(laws[row, code], seen, option.get("repetition_penalty", 1.0))
        scores = warpers.warp(scores, heat, option.get("top_k", 0))
        if coupled and heat > 0:
            scores = scores + NOISE[row, len(path)]
        return scores, warpers.log_softmax(scores / tau)

    return score


def paths_of(tree, row):
    """Each valid node's tokens below the root, through `parent`; None for the others."""
    parent, tokens = np.asarray(tree.parent)[row], np.asarray(tree.tokens)[row]
    lines = [trees.path_to(parent, node)[1:] for node in range(tree.nodes)]
    return [
        tuple(tokens[line].tolist()) if ok else None
        for line, ok in zip(lines, np.asarray(tree.valid)[row], strict=True)
    ]


def well_formed(tree):
    parent, depth, valid = (np.asarray(x) for x in (tree.parent, tree.depth, tree.valid))
    assert (parent[:, 0] == -1).all() and (depth[:, 0] == 0).all() and valid[:, 0].all()
    assert ((parent[:, 1:] >= 0) & (parent[:, 1:] < np.arange(1, tree.nodes))).all()
    above = np.take_along_axis(valid, np.maximum(parent, 0), axis=1)
    assert above[valid].all() and (np.asarray(tree.tokens)[~valid] == -1).all()
    np.testing.assert_array_equal(
        depth[:, 1:][valid[:, 1:]], np.take_along_axis(depth, np.maximum(parent, 0), 1)[:, 1:][valid[:, 1:]] + 1
    )
    assert depth.max() <= tree.max_depth


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "expander",
    [TopK(k=3, depth=4, nodes=14, tau=0.5), TopK(k=2, depth=3, nodes=8, coupled=False)],
)
def test_top_k_equals_eagle2_with_host_lists(expander, name):
    for seed in range(4):
        laws = table(seed)
        tree = expand(expander, jnp.asarray(laws), sampler_of(name))
        well_formed(tree)
        for row in range(B):
            score = by_hand(laws, row, name, expander.coupled, expander.tau)
            paths, parents, totals = oracle.eagle2(score, expander.k, expander.depth, expander.nodes)
            real = [total > -np.inf for total in totals]
            assert np.asarray(tree.valid)[row].tolist() == real
            assert paths_of(tree, row) == [path if ok else None for path, ok in zip(paths, real, strict=True)]
            got = np.asarray(tree.parent)[row]
            assert [g for g, ok in zip(got, real, strict=True) if ok] == [
                p for p, ok in zip(parents, real, strict=True) if ok
            ]


def test_top_k_keeps_the_worthiest_of_all_candidates():
    """Every kept node's worth, taken along its own path, is among the m - 1 largest of all candidates'."""
    expander, laws = TopK(k=3, depth=4, nodes=14, tau=0.5), table(9)
    tree = expand(expander, jnp.asarray(laws), sampler_of("sampled"))
    for row in range(B):
        score = by_hand(laws, row, "sampled", True, 0.5)
        every = sorted((c.total for c in oracle.eagle2_candidates(score, 3, 4)), reverse=True)
        kept = [sum(score(path[:d])[1][t] for d, t in enumerate(path)) for path in paths_of(tree, row)[1:]]
        np.testing.assert_allclose(sorted(kept, reverse=True), every[:13], rtol=1e-9)
        assert len(set(paths_of(tree, row))) == 14


@pytest.mark.parametrize("name", ["greedy", "mixed"])
def test_top_1_is_the_chain(name):
    laws = jnp.asarray(table(1))
    tree = expand(TopK(k=1, depth=3, nodes=4), laws, sampler_of(name))
    chain = expand(Chain(3), laws, sampler_of(name), keep_q=True)
    assert (tree.tokens == chain.tokens).all() and (tree.parent == chain.parent).all() and tree.valid.all()


def test_filtered_candidates_are_invalid():
    """Top-k 1 and 2 leave fewer candidates than the beam is wide."""
    tree = expand(TopK(k=3, depth=4, nodes=14, tau=0.5), jnp.asarray(table(0)), sampler_of("narrow"))
    assert np.asarray(tree.valid).sum(axis=1).tolist() == [1 + 4, 14, 14]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("coupled", [True, False])
def test_static_equals_the_oracle(coupled, name):
    expander = Static(((0,), (2,), (1,), (0, 1), (0, 0), (2, 3), (2, 3, 0), (0, 0, 1), (0, 0, 1, 0)), coupled)
    topology = expander.topology
    choices = [tuple(topology.ranks[n] for n in trees.path_to(topology.parents, n)[1:]) for n in range(expander.nodes)]
    for seed in range(4):
        laws = table(seed)
        tree = expand(expander, jnp.asarray(laws), sampler_of(name))
        well_formed(tree)
        for row in range(B):
            want = oracle.static(by_hand(laws, row, name, coupled), expander.choices)
            assert paths_of(tree, row) == [want[choice] for choice in choices]


@pytest.mark.parametrize("name", SETTINGS)
def test_chain_equals_the_oracle_and_records_its_laws(name):
    laws = table(2)
    tree = expand(Chain(3), jnp.asarray(laws), sampler_of(name), keep_q=True)
    well_formed(tree)
    assert tree.is_chain and tree.log_q.shape == (B, 4, V)
    for row in range(B):
        path = ()
        noisy, plain = by_hand(laws, row, name, True), by_hand(laws, row, name, False)
        for depth in range(3):
            law = warpers.softmax(plain(path)[0])
            if np.broadcast_to(SETTINGS[name].get("temperature", 0.0), B)[row] == 0:
                law = np.eye(V)[plain(path)[0].argmax()]
            np.testing.assert_allclose(np.exp(np.asarray(tree.log_q)[row, depth]), law, atol=1e-5)
            path += (int(noisy(path)[0].argmax()),)
        assert paths_of(tree, row)[-1] == path


BUSHY = Static(((0,), (1,), (0, 0), (0, 2), (1, 0), (1, 0, 0)))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("expander", [BUSHY, EarlyStop(3, 0.2, width=2)], ids=["static", "early_stop"])
def test_trees_record_the_distribution_of_every_parent(expander, name):
    """Found from the node's own path; at a sampled node it is what `log q + g` was ranked by, without g."""
    laws = table(3)
    tree = expand(expander, jnp.asarray(laws), sampler_of(name), keep_q=True)
    assert tree.children == expander.children == "coupled" and tree.log_q.shape == (B, expander.nodes, V)
    topology = expander.topology
    for row in range(B):
        plain, paths = by_hand(laws, row, name, False), paths_of(tree, row)
        cold = np.broadcast_to(SETTINGS[name].get("temperature", 0.0), B)[row] == 0
        parents = {topology.parents[n] for n in range(1, expander.nodes) if tree.valid[row, n]}
        assert 0 in parents
        for node in parents:
            scores = plain(paths[node])[0]
            wanted = np.eye(V)[scores.argmax()] if cold else warpers.softmax(scores)
            np.testing.assert_allclose(np.exp(np.asarray(tree.log_q)[row, node]), wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["mixed", "sampled"])
def test_a_static_chain_records_what_the_chain_does(name):
    laws = jnp.asarray(table(1))
    static = expand(Static(((0,), (0, 0), (0, 0, 0))), laws, sampler_of(name), keep_q=True)
    jax.tree.map(np.testing.assert_array_equal, static, expand(Chain(3), laws, sampler_of(name), keep_q=True))


def sizes(expander, keep_q):
    """Shapes of all arrays in the program that grows a tree, in its branches too."""
    laws, sampler = jnp.asarray(table(2)), sampler_of("greedy")
    jaxpr = jax.make_jaxpr(lambda laws: expand(expander, laws, sampler, keep_q=keep_q).log_q)(laws)

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.shape for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from walk(inner)

    return set(walk(jaxpr.jaxpr))


@pytest.mark.parametrize(
    "expander", [Chain(3), BUSHY, EarlyStop(3, 0.2, width=2)], ids=["chain", "static", "early_stop"]
)
def test_distributions_are_kept_only_on_request(expander):
    """A verifier that does not ask for them leaves no `[B, N, V]` array in the program."""
    whole = (B, expander.nodes, V)
    assert whole in sizes(expander, True) and whole not in sizes(expander, False)


@pytest.mark.parametrize("expander", [TopK(k=2, depth=3, nodes=6), Static(BUSHY.choices, coupled=False)])
def test_what_is_not_drawn_has_no_distribution(expander):
    laws, sampler = jnp.asarray(table(2)), sampler_of("sampled")
    tree = jax.eval_shape(lambda: expand(expander, laws, sampler, keep_q=True))
    assert tree.log_q is None and tree.children == expander.children == "deterministic"


def test_the_driver_notices_a_wrong_mask():
    """`grow` gives NaN if `visible` and `parent` tell different paths; a NaN law makes its candidates invalid."""
    laws = jnp.asarray(table(0))

    class Blind(TopK):
        def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
            def wrong(carry, level):
                return grow(carry, type(level)(level.tokens, level.parent, level.visible & False, level.depth))

            return super().__call__(root, logits, wrong, carry, sampler, keep_q=keep_q)

    assert int(expand(Blind(k=2, depth=2, nodes=4), laws, sampler_of("greedy")).valid.sum()) == B * 3


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Chain(0),
        lambda: Static(()),
        lambda: Static(((0, 0),)),
        lambda: TopK(k=0),
        lambda: TopK(k=2, depth=1, nodes=4),
        lambda: TopK(nodes=1),
        lambda: TopK(tau=0.0),
    ],
)
def test_bad_shapes(bad):
    with pytest.raises(ValueError, match="chain|static|top_k|choice"):
        bad()
