"""Expanders against their oracles."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from support.growth import SETTINGS, B, V, by_hand, expand, paths_of, sampler_of, table, well_formed

from specjax.expand import IID, Chain, DySpec, EarlyStop, GreedyDraft, Static, TopK, WithoutReplacement
from specjax.reference import expand as oracle
from specjax.reference import statistics, trees, warpers


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "expander",
    [TopK(k=3, depth=4, nodes=14, tau=0.5), TopK(k=2, depth=3, nodes=8, coupled=False)],
)
def test_top_k_equals_eagle2_with_host_lists(expander, name):
    for seed in range(4):
        dists = table(seed)
        tree = expand(expander, jnp.asarray(dists), sampler_of(name))
        well_formed(tree)
        for row in range(B):
            score = by_hand(dists, row, name, expander.coupled, expander.tau)
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
    expander, dists = TopK(k=3, depth=4, nodes=14, tau=0.5), table(9)
    tree = expand(expander, jnp.asarray(dists), sampler_of("sampled"))
    for row in range(B):
        score = by_hand(dists, row, "sampled", True, 0.5)
        every = sorted((c.total for c in oracle.eagle2_candidates(score, 3, 4)), reverse=True)
        kept = [sum(score(path[:d])[1][t] for d, t in enumerate(path)) for path in paths_of(tree, row)[1:]]
        np.testing.assert_allclose(sorted(kept, reverse=True), every[:13], rtol=1e-9)
        assert len(set(paths_of(tree, row))) == 14


@pytest.mark.parametrize("name", ["greedy", "mixed"])
def test_top_1_is_the_chain(name):
    dists = jnp.asarray(table(1))
    tree = expand(TopK(k=1, depth=3, nodes=4), dists, sampler_of(name))
    chain = expand(Chain(3), dists, sampler_of(name), keep_q=True)
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
        dists = table(seed)
        tree = expand(expander, jnp.asarray(dists), sampler_of(name))
        well_formed(tree)
        for row in range(B):
            want = oracle.static(by_hand(dists, row, name, coupled), expander.choices)
            assert paths_of(tree, row) == [want[choice] for choice in choices]


@pytest.mark.parametrize("name", SETTINGS)
def test_chain_equals_the_oracle_and_records_its_distributions(name):
    dists = table(2)
    tree = expand(Chain(3), jnp.asarray(dists), sampler_of(name), keep_q=True)
    well_formed(tree)
    assert tree.is_chain and tree.log_q.shape == (B, 4, V)
    for row in range(B):
        path = ()
        noisy, plain = by_hand(dists, row, name, True), by_hand(dists, row, name, False)
        for depth in range(3):
            dist = warpers.softmax(plain(path)[0])
            if np.broadcast_to(SETTINGS[name].get("temperature", 0.0), B)[row] == 0:
                dist = np.eye(V)[plain(path)[0].argmax()]
            np.testing.assert_allclose(np.exp(np.asarray(tree.log_q)[row, depth]), dist, atol=1e-5)
            path += (int(noisy(path)[0].argmax()),)
        assert paths_of(tree, row)[-1] == path


BUSHY = Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0)))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("expander", [BUSHY, EarlyStop(3, 0.2, width=2)], ids=["static", "early_stop"])
def test_trees_record_the_distribution_of_every_parent(expander, name):
    """Found from the node's own path; at a sampled node it is what `log q + g` was ranked by, without g."""
    dists = table(3)
    tree = expand(expander, jnp.asarray(dists), sampler_of(name), keep_q=True)
    assert tree.children == expander.children == "coupled" and tree.log_q.shape == (B, expander.nodes, V)
    topology = expander.topology
    for row in range(B):
        plain, paths = by_hand(dists, row, name, False), paths_of(tree, row)
        cold = np.broadcast_to(SETTINGS[name].get("temperature", 0.0), B)[row] == 0
        parents = {topology.parents[n] for n in range(1, expander.nodes) if tree.valid[row, n]}
        assert 0 in parents
        for node in parents:
            scores = plain(paths[node])[0]
            wanted = np.eye(V)[scores.argmax()] if cold else warpers.softmax(scores)
            np.testing.assert_allclose(np.exp(np.asarray(tree.log_q)[row, node]), wanted, atol=1e-5)


OWN = IID(tree="3 | 2 0 1 | 1"), WithoutReplacement(tree="3 | 2 0 1 | 1")


@functools.partial(jax.jit, static_argnames=("expander",))
def expand_all(expander, dists, samplers):
    return jax.vmap(lambda sampler: expand(expander, dists, sampler, keep_q=True))(samplers)


@pytest.mark.parametrize(
    ("expander", "name"),
    [
        pytest.param(OWN[0], "mixed", id="iid-mixed"),
        *(
            pytest.param(expander, name, marks=pytest.mark.slow)
            for expander, name in ((OWN[0], "sampled"), (OWN[1], "sampled"), (OWN[1], "mixed"))
        ),
    ],
)
def test_children_of_their_own_noise_have_the_distribution_that_is_recorded(expander, name):
    """Chi-square of 20,000 trees: the children of the root and of a node together, given that node's token."""
    dists, many = jnp.asarray(table(4)), 20_000
    one = sampler_of(name)
    keys = jax.random.split(jax.random.key(11), (many, B))
    every = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (many, *x.shape)), dataclasses.replace(one, key=keys[0]))
    trees_ = expand_all(expander, dists, dataclasses.replace(every, key=keys))
    tree = jax.tree.map(lambda x: x[0], trees_)
    well_formed(tree)
    assert tree.children == expander.children and trees_.log_q.shape == (many, B, expander.nodes, V)
    tokens = np.asarray(trees_.tokens)
    for row in range(B):
        if np.broadcast_to(SETTINGS[name]["temperature"], B)[row] == 0:
            order = np.argsort(-by_hand(dists, row, name, False)(())[0], kind="stable")
            assert (tokens[:, row, 1:4] == order[None, :3]).all()  # the likeliest, always
            continue
        counts, dist = np.zeros((V + 1,) * 4), np.zeros((V + 1,) * 4)
        np.add.at(counts, tuple(tokens[:, row, [1, 2, 4, 5]].T), 1)
        score = by_hand(dists, row, name, False)
        again = expander.children == "iid"
        for first, second, third, fourth in itertools.product([*range(V), -1], repeat=4):
            if first >= 0:
                dist[first, second, third, fourth] = two(warpers.softmax(score(())[0]), first, second, again) * two(
                    warpers.softmax(score((first,))[0]), third, fourth, again
                )
        assert dist.sum() == pytest.approx(1) and statistics.chi_square(counts, dist) > 1e-4


def two(dist, first, second, again):
    """The chance of two draws; -1 is one where nothing is left."""
    left = dist if again else np.where(np.arange(V) == first, 0, dist)
    if first < 0 or left.sum() == 0:
        return 0.0 if first < 0 else dist[first] * (second < 0)
    return dist[first] * (left[second] / left.sum() if second >= 0 else 0)


@pytest.mark.parametrize("expander", OWN, ids=["iid", "without_replacement"])
def test_nodes_of_one_depth_have_noise_of_their_own(expander):
    """Nodes 1 and 3 are scored by distributions that are equal here, and their first children differ as often as two
    draws do."""
    dists = jnp.zeros_like(jnp.asarray(table(0)))
    one, many = sampler_of("sampled"), 2000
    keys = jax.random.split(jax.random.key(5), (many, B))
    every = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (many, *x.shape)), dataclasses.replace(one, key=keys[0]))
    tokens = np.asarray(expand_all(expander, dists, dataclasses.replace(every, key=keys)).tokens)
    assert abs((tokens[:, :, 4] == tokens[:, :, 6]).mean() - 1 / V) < 0.02


@pytest.mark.parametrize("name", SETTINGS)
def test_a_greedy_draft_is_the_likeliest_and_a_draw_from_the_rest(name):
    """Node 0 has three children, node 1 two, node 3 one, which is a plain draw; that its distribution is the recorded
    one is counted in `tests/verify/test_top_down.py`."""
    dists, expander = table(6), GreedyDraft(tree="3 | 2 0 1")
    tree = expand(expander, jnp.asarray(dists), sampler_of(name), keep_q=True)
    well_formed(tree)
    tokens, log_q = np.asarray(tree.tokens), np.asarray(tree.log_q)
    for row in range(B):
        cold = np.broadcast_to(SETTINGS[name].get("temperature", 0.0), B)[row] == 0
        for node, children in ((0, [1, 2, 3]), (1, [4, 5]), (3, [6])):
            path = paths_of(tree, row)[node]
            if path is None:
                continue
            scores = by_hand(dists, row, name, False)(path)[0]
            likeliest = [t if scores[t] > -np.inf else -1 for t in np.argsort(-scores, kind="stable")[: len(children)]]
            assert tokens[row, children[:-1]].tolist() == likeliest[:-1]
            dist = np.eye(V)[scores.argmax()] if cold else warpers.softmax(scores)
            dist[[t for t in likeliest[:-1] if t >= 0]] = 0
            np.testing.assert_allclose(np.exp(log_q[row, node]), dist / max(dist.sum(), 1e-300), atol=1e-5)
            last = tokens[row, children[-1]]
            assert last == likeliest[-1] if cold else (dist[last] > 0 if dist.sum() else last == -1)


@pytest.mark.parametrize("name", ["mixed", "sampled"])
def test_a_static_chain_records_what_the_chain_does(name):
    dists = jnp.asarray(table(1))
    static = expand(Static(((0,), (0, 0), (0, 0, 0))), dists, sampler_of(name), keep_q=True)
    jax.tree.map(np.testing.assert_array_equal, static, expand(Chain(3), dists, sampler_of(name), keep_q=True))


def sizes(expander, keep_q):
    """Shapes of all arrays in the program that grows a tree, in its branches too."""
    dists, sampler = jnp.asarray(table(2)), sampler_of("greedy")
    jaxpr = jax.make_jaxpr(lambda dists: expand(expander, dists, sampler, keep_q=keep_q).log_q)(dists)

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.shape for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from walk(inner)

    return set(walk(jaxpr.jaxpr))


@pytest.mark.parametrize(
    "expander",
    [Chain(3), BUSHY, EarlyStop(3, 0.2, width=2), *OWN, GreedyDraft(k=2, length=2), DySpec(k=2, depth=2, nodes=5)],
    ids=["chain", "static", "early_stop", "iid", "wor", "greedy", "dyspec"],
)
def test_distributions_are_kept_only_on_request(expander):
    """A verifier that does not ask for them leaves no `[B, N, V]` array in the program."""
    whole = (B, expander.nodes, V)
    assert whole in sizes(expander, True) and whole not in sizes(expander, False)


@pytest.mark.parametrize(
    "expander",
    [
        TopK(k=2, depth=3, nodes=6),
        Static(BUSHY.choices, coupled=False),
        Static(((0,), (0, 0), (0, 2))),  # the second draw is left out, so the third is none from the rest
        Static(((1,),)),
        EarlyStop(3, 0.2, width=2, narrowing=True),  # siblings are left out for what was drawn
    ],
)
def test_what_is_not_drawn_has_no_distribution(expander):
    dists, sampler = jnp.asarray(table(2)), sampler_of("sampled")
    tree = jax.eval_shape(lambda: expand(expander, dists, sampler, keep_q=True))
    assert tree.log_q is None and tree.children == expander.children == "deterministic"


def test_the_driver_notices_a_wrong_mask():
    """`grow` gives NaN if `visible` and `parent` tell different paths; a NaN distribution makes its candidates
    invalid."""
    dists = jnp.asarray(table(0))

    class Blind(TopK):
        def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
            def wrong(carry, level):
                return grow(carry, type(level)(level.tokens, level.parent, level.visible & False, level.depth))

            return super().__call__(root, logits, wrong, carry, sampler, keep_q=keep_q)

    assert int(expand(Blind(k=2, depth=2, nodes=4), dists, sampler_of("greedy")).valid.sum()) == B * 3


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
        lambda: IID(k=0),
        lambda: WithoutReplacement(tree="0"),
    ],
)
def test_bad_shapes(bad):
    with pytest.raises(ValueError, match="chain|static|top_k|choice|iid|without_replacement"):
        bad()
