"""The coupled verifier against walks down the tree."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.lm import Output
from specjax.reference import trees as oracle
from specjax.reference import warpers
from specjax.sampling import Sampler, SamplingArrays
from specjax.sampling.noise import gumbel
from specjax.tree import Topology, Tree, root_only
from specjax.verify import Coupled

N, B, V, DEPTH = 10, 3, 3, 9  # a tiny vocabulary, so that draws hit, and siblings repeat each other


@jax.jit
def judge(draw, tree):
    return Coupled()(Output(delta=(), draw=draw), tree, None)


@st.composite
def rows(draw):
    parent = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, N)))
    token = st.lists(st.integers(0, V - 1), min_size=N, max_size=N)
    return parent, draw(token), draw(token), draw(st.sets(st.integers(1, N - 1), max_size=3))


def build(parents, tokens, invalid):
    """A dynamic tree whose valid nodes have valid parents, and whose invalid nodes hold -1."""
    valid = np.ones((len(parents), N), bool)
    for row, parent in enumerate(parents):
        for node in range(1, N):
            valid[row, node] = node not in invalid[row] and valid[row, parent[node]]
    depth = [[len(oracle.path_to(parent, n)) - 1 for n in range(N)] for parent in parents]
    tokens = np.where(valid, tokens, -1)
    return Tree(*(jnp.asarray(x) for x in (tokens, parents, depth, valid)), max_depth=DEPTH)


def check(verdict, tree, walks):
    for row, (path, accepted, token) in enumerate(walks):
        assert verdict.path[row].tolist() == path + [-1] * (tree.max_depth + 1 - len(path))
        assert int(verdict.accepted[row]) == accepted and int(verdict.next_token[row]) == token


@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), min_size=B, max_size=B))
def test_random_trees_and_draws_equal_the_walk(batch):
    parents, tokens, draws, invalid = zip(*batch, strict=True)
    tree = build(parents, tokens, invalid)
    verdict = judge(jnp.asarray(draws, jnp.int32), tree)
    check(verdict, tree, [oracle.walk(tree.tokens[i], parents[i], tree.valid[i], draws[i]) for i in range(B)])


def test_static_trees_equal_the_walk():
    rng = np.random.default_rng(0)
    topology = Topology.from_counts("3 | 2x3 | 1x6")
    nodes = len(topology.parents)
    for _ in range(20):
        tokens, draws = rng.integers(0, V, (2, B, nodes))
        tree = Tree.of(topology, jnp.asarray(tokens), jnp.asarray(rng.random((B, nodes)) < 0.9).at[:, 0].set(True))
        verdict = judge(jnp.asarray(draws, jnp.int32), tree)
        walks = [oracle.walk(tree.tokens[i], topology.parents, tree.valid[i], draws[i]) for i in range(B)]
        check(verdict, tree, walks)


def test_of_equal_siblings_the_deeper_path_wins():
    tree = build([(-1, 0, 0, 2, 3, *[0] * 5)], [[0, 1, 1, 2, 0, *[2] * 5]], [set()])
    verdict = judge(jnp.asarray([[1, 0, 2, 0, 1, *[0] * 5]]), tree)
    assert verdict.path[0].tolist()[:5] == [0, 2, 3, 4, -1] and verdict.next_token.tolist() == [1]


def test_failed_draws_match_no_invalid_node():
    tree = build([tuple(range(-1, N - 1))], [[1] * N], [{2}])
    draws = jnp.full((1, N), -1).at[0, 0].set(1)
    verdict = judge(draws, tree)
    assert verdict.accepted.tolist() == [1] and verdict.next_token.tolist() == [-1]


def test_the_root_alone():
    verdict = Coupled()(Output(delta=(), draw=jnp.asarray([[3], [-1]])), root_only(jnp.asarray([1, 2])), None)
    assert verdict.path.tolist() == [[0], [0]] and verdict.accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [3, -1]


def test_from_logits_to_verdict():
    """With the sampler's own draws: greedy rows follow the argmax, sampled ones argmax(warped + the depth's noise)."""
    rng = np.random.default_rng(1)
    topology = Topology.from_counts("3 | 3x3 | 3x9")
    nodes, rows = len(topology.parents), 16
    siblings = jnp.asarray([list(topology.ranks)] * rows)
    tree = Tree.of(topology, siblings, jnp.ones((rows, nodes), bool))  # every token of V = 3 is there
    logits = 3 * rng.normal(size=(rows, nodes, V)).astype(np.float32)
    lengths = jnp.asarray(rng.integers(1, 9, rows))
    sampler = Sampler(
        jax.random.split(jax.random.key(0), rows),
        jnp.zeros((rows, 16), int),
        lengths,
        jnp.ones(rows, bool),
        SamplingArrays.make(rows, temperature=[0.0, 1.0] * 8, top_k=2),
    )

    @jax.jit
    def run(sampler, logits):
        draw = sampler.draw(logits, tree.depth, tree.path_tokens, tree.max_depth)
        noise = gumbel(sampler.key, sampler.length[:, None] + jnp.arange(4)[None], V)
        return Coupled()(Output(delta=(), draw=draw), tree, sampler), noise

    verdict, noise = run(sampler, jnp.asarray(logits))
    walks = []
    for row in range(rows):
        own = siblings[row], topology.parents, [True] * nodes
        if row % 2:
            warped = np.stack([warpers.warp(z, 1.0, 2) for z in logits[row]])
            walks.append(oracle.coupled_walk(*own, warped, np.asarray(noise)[row]))
        else:
            walks.append(oracle.greedy_walk(*own, logits[row]))
        assert walks[-1][1] == 3  # nothing can miss
    check(verdict, tree, walks)
