"""Token trees: shapes, ancestors and paths against plain walks."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.draft import TokenRecycling
from specjax.draft.token_recycling import PUBLISHED_TREE
from specjax.reference import trees as oracle
from specjax.tree import Topology, Tree, root_only

N, B, DEPTH = 9, 2, 8  # one shape for all random trees: nothing is compiled twice


@st.composite
def parents(draw):
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, N)))


def dynamic(rows):
    """A tree whose shape is data, as an expander makes it."""
    depth = [[len(oracle.path_to(parent, n)) - 1 for n in range(N)] for parent in rows]
    tokens = np.arange(len(rows) * N).reshape(len(rows), N) + 1
    return Tree(
        jnp.asarray(tokens), jnp.asarray(rows), jnp.asarray(depth), jnp.ones(tokens.shape, bool), max_depth=DEPTH
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(parents(), min_size=B, max_size=B), st.lists(st.integers(0, N - 1), min_size=B, max_size=B))
def test_random_trees_equal_the_oracle(rows, nodes):
    tree = dynamic(rows)
    above = tree.ancestors()
    paths = tree.path_to(jnp.asarray(nodes), above)
    tokens = tree.path_tokens()
    for row, parent in enumerate(rows):
        np.testing.assert_array_equal(above[row], oracle.ancestors(parent))
        want = oracle.path_to(parent, nodes[row])
        assert paths[row].tolist() == want + [-1] * (DEPTH + 1 - len(want))
        np.testing.assert_array_equal(tokens[row], oracle.path_tokens(tree.tokens[row], parent, DEPTH))


@settings(max_examples=25, deadline=None)
@given(parents(), st.integers(0, 2**N - 1))
def test_static_trees_equal_the_oracle(parent, mask):
    topology = Topology(parent, (0,) * N)
    np.testing.assert_array_equal(topology.ancestors(), oracle.ancestors(parent))
    assert topology.depths == tuple(len(oracle.path_to(parent, n)) - 1 for n in range(N))
    assert topology.is_chain == (max(topology.depths) == N - 1)
    offered = np.array([True] + [bool(mask >> n & 1) for n in range(1, N)])
    tree = Tree.of(topology, jnp.arange(N)[None] + 5, jnp.asarray(offered)[None])
    closed = [all(offered[oracle.path_to(parent, n)]) for n in range(N)]
    assert tree.valid[0].tolist() == closed
    assert tree.tokens[0].tolist() == [n + 5 if ok else -1 for n, ok in enumerate(closed)]
    assert tree.max_depth == max(topology.depths) and tree.ancestors().shape == (1, N, N)


def test_static_and_dynamic_agree():
    topology = Topology.from_counts("3 | 2 0 1 | 1 0 1")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (B, len(topology.parents))))
    fixed = Tree.of(topology, tokens, jnp.ones(tokens.shape, bool))
    free = Tree(fixed.tokens, fixed.parent, fixed.depth, fixed.valid, max_depth=fixed.max_depth)
    assert (fixed.path_tokens() == free.path_tokens()).all()
    assert (jnp.broadcast_to(fixed.ancestors(), free.ancestors().shape) == free.ancestors()).all()
    nodes = jnp.asarray([3, 6])
    assert (fixed.path_to(nodes, fixed.ancestors()) == free.path_to(nodes, free.ancestors())).all()
    assert not free.is_chain and not fixed.is_chain


def test_chain_and_root():
    chain = Topology.chain(3)
    assert chain.parents == (-1, 0, 1, 2) and chain.is_chain and chain.depths == (0, 1, 2, 3)
    assert Topology.chain(0).is_chain
    root = root_only(jnp.asarray([4, 7]))
    assert root.tokens.tolist() == [[4], [7]] and root.max_depth == 0 and root.is_chain
    assert root.path_tokens().shape == (2, 1, 0) and root.path_to(jnp.zeros(2, int), root.ancestors()).tolist() == [
        [0],
        [0],
    ]


def test_from_choices():
    topology = Topology.from_choices(((0, 1), (1,), (0,), (0, 1, 2)))
    assert topology.parents == (-1, 0, 0, 1, 3) and topology.ranks == (0, 0, 1, 1, 2)
    with pytest.raises(ValueError, match="repeat"):
        Topology.from_choices(((0,), (0,)))
    with pytest.raises(ValueError, match="no parent"):
        Topology.from_choices(((0,), (1, 0)))
    for bad in (((), (0,)), ((0,), (-1,))):
        with pytest.raises(ValueError, match="ranks"):
            Topology.from_choices(bad)


def test_from_counts():
    topology = Topology.from_counts("2 | 1 2")
    assert topology.parents == (-1, 0, 0, 1, 2, 2) and topology.ranks == (0, 0, 1, 0, 0, 1)
    assert Topology.from_counts("3 | 1x2").parents == (-1, 0, 0, 0, 1, 2)
    assert Topology.from_counts("1 | 1 | 1") == Topology.chain(3)
    with pytest.raises(ValueError, match="child counts"):
        Topology.from_counts("2 | 1 1 1")
    for bad in ("2 | a", "-1", "1xx2"):
        with pytest.raises(ValueError, match="neither"):
            Topology.from_counts(bad)


def test_published_token_recycling_tree():
    topology = Topology.from_counts(PUBLISHED_TREE)
    assert len(topology.parents) == 81
    assert np.bincount(topology.depths).tolist() == [1, 8, 21, 25, 15, 8, 3]
    assert max(topology.ranks) == 7
    drafter = TokenRecycling(tree=PUBLISHED_TREE)
    assert drafter.nodes == 81 and drafter.depth == 6


def test_join():
    first, second = Topology.from_counts("2 | 1"), Topology.from_counts("1 | 2")
    joined = first.join(second)
    assert joined.parents == (-1, 0, 0, 1, 0, 4, 4) and joined.ranks == (0, 0, 1, 0, 0, 0, 1)
    assert joined.depths == (0, 1, 1, 2, 1, 2, 2)
