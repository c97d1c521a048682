"""What a proposal hands to the target, and two proposals under one root."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CAPACITY, CONFIG, DRAFTERS, SLOW, but_slow, params, target_of

import specjax
from specjax.draft import Extra, NoDrafter, PromptLookup, Proposal, TokenRecycling, View, fuse
from specjax.reference import trees as oracle
from specjax.sampling import Sampler
from specjax.tree import Topology, Tree

VIEW = View(jnp.asarray([[7, 8, 7, 0], [5, 0, 0, 0]]), jnp.asarray([3, 1]), jnp.ones(2, bool), (), max_depth=2)


class Fixed(NoDrafter):
    """Proposes what it is given."""

    def __init__(self, tree, extra=None):
        object.__setattr__(self, "proposal", Proposal(tree, (), extra))

    def propose(self, params, draft, view, sampler):
        return self.proposal


def tree_of(topology, seed, dynamic=False):
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, 9, (2, len(topology.parents)))).at[:, 0].set(7)
    tree = Tree.of(topology, tokens, jnp.ones(tokens.shape, bool).at[1, 2].set(False))
    return Tree(tree.tokens, tree.parent, tree.depth, tree.valid, max_depth=tree.max_depth) if dynamic else tree


def test_a_chain_goes_to_the_target_without_a_mask():
    block = Proposal(tree_of(Topology.chain(3), 0), ()).block(VIEW)
    assert block.visible is None and block.causal
    assert block.positions.tolist() == [[2, 3, 4, 5], [0, 1, 2, 3]] and block.length.tolist() == [2, 0]


def test_a_tree_shows_each_node_its_ancestors():
    topology = Topology.from_counts("2 | 1 2")
    block = Proposal(tree_of(topology, 0), ()).block(VIEW)
    np.testing.assert_array_equal(block.visible[0], oracle.ancestors(topology.parents))
    assert block.positions.tolist() == [[2, 3, 3, 4, 4, 4], [0, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("embeddings", [None, jnp.ones((2, 2, 3))])
def test_extra_slots_come_after_the_nodes_and_no_node_sees_them(dynamic, embeddings):
    tree = tree_of(Topology.from_counts("2 | 1"), 0, dynamic)
    extra = Extra(jnp.full((2, 2), 3), jnp.asarray([[4, 5], [2, 3]]), jnp.ones((2, 2, 6), bool), embeddings)
    block = Proposal(tree, (), extra).block(VIEW)
    assert block.tokens.shape == block.positions.shape == (2, 6) and block.visible.shape == (2, 6, 6)
    assert not block.visible[:, :4, 4:].any() and block.visible[:, 4:].all()
    assert block.positions[:, 4:].tolist() == [[4, 5], [2, 3]]
    if embeddings is None:
        assert block.embedded is None
    else:
        assert block.embedded.tolist() == [[False] * 4 + [True] * 2] * 2 and (block.embeddings[:, 4:] == 1).all()


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, False), (True, True)])
def test_fused_trees_hold_the_paths_of_both(first, second):
    a, b = tree_of(Topology.from_counts("2 | 1 2"), 1, first), tree_of(Topology.from_counts("1 | 2 | 1 1"), 2, second)
    both = fuse(Fixed(a), Fixed(b)).propose({"draft": None}, ((), ()), VIEW, None).tree
    assert both.nodes == a.nodes + b.nodes - 1 and both.max_depth == 3
    assert (both.topology is None) == (first or second)
    for row in range(2):
        paths = [oracle.path_tokens(t.tokens[row], np.asarray(t.parent)[row], 3).tolist() for t in (a, b, both)]
        assert paths[2] == paths[0] + paths[1][1:]
        assert both.valid[row].tolist() == a.valid[row].tolist() + b.valid[row].tolist()[1:]
    np.testing.assert_array_equal(both.ancestors()[0], oracle.ancestors(np.asarray(both.parent)[0]))


def test_fuse_adds_up_what_its_drafters_say():
    fused = fuse(PromptLookup(length=5), TokenRecycling(tree="3 | 1"))
    assert fused.nodes == 6 + 5 - 1 and fused.depth == 5 and fused.wants.topk == 8


STORELESS = [name for name in DRAFTERS if name not in ("rest", "rasd")]  # a store is made by a whole run


@pytest.mark.parametrize(
    "name", but_slow(STORELESS, *SLOW, "prompt_lookup", "token_recycling", "eagle2", "kangaroo", "ppd")
)
def test_a_drafter_says_what_its_trees_are(name):
    """Before any is proposed, as a verifier asks it; and drawn children come with their distributions, others without."""
    decoder, model = specjax.speculative(target_of(name), DRAFTERS[name]), params(name)
    drafter = decoder.drafter.recording(True)
    decoder = dataclasses.replace(decoder, drafter=drafter)

    def propose(model):
        state = decoder.empty(model, 2, CAPACITY)
        live = ~state.done
        view = View(state.tokens, state.length, live, state.cache, max_depth=drafter.depth, keep_q=True)
        sampler = Sampler(state.key, state.tokens, state.length, live, state.sampling)
        leads = jax.tree.map(lambda leaf, axes: axes[0] == "batch", state.draft, drafter.axes(state.draft))
        own.extend(jax.tree.leaves(leads))
        return drafter.propose(model, state.draft, view, sampler).tree

    own: list[bool] = []
    tree = jax.eval_shape(propose, model)
    assert all(own) or not drafter.alone  # what rows share depends on all of them
    assert tree.children == drafter.children
    assert tree.nodes == drafter.nodes and tree.max_depth <= drafter.depth and (tree.is_chain or not drafter.is_chain)
    if drafter.children == "deterministic":
        assert tree.log_q is None
    else:
        assert tree.log_q.shape == (2, drafter.nodes, CONFIG.vocab_size)
