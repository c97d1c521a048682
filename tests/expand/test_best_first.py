"""JetSpec's tree, of levels that share a distribution: against a heap, and against what its authors' program builds."""

import dataclasses
import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CAPACITY, DRAFTERS, params, target_of
from support.growth import B, V, paths_of, sampler_of, well_formed

import specjax
from specjax.assembly.registry import DRAFTERS as REGISTRY
from specjax.assembly.registry import parse
from specjax.draft import DFlash, DSpark, OmniDraft, View
from specjax.draft.base import TreeDrafter
from specjax.expand import BestFirst, Expander, TopK
from specjax.reference import warpers
from specjax.sampling import Sampler

DEPTH = 4


@functools.partial(jax.jit, static_argnames=("expander", "name"))
def grown(expander, logits, name="greedy"):
    """The tree of a drafter whose levels have the logits `[B, D, V]`, whatever their nodes."""

    def grow(carry, level):
        assert level.tokens.shape == (B, 1) and level.visible.shape == (1, 1, level.depth)
        return carry, logits[:, level.depth][:, None]

    return expander(jnp.zeros((len(logits),), jnp.int32), logits[:, 0], grow, None, sampler_of(name))


def by_heap(levels, k, nodes):
    """Paths in the order in which nodes are added: the likeliest node's `k` best children at once."""
    paths, heap = [()], [(-0.0, 0)]
    while heap and len(paths) < nodes:
        worth, node = heapq.heappop(heap)
        path = paths[node]
        if len(path) == len(levels):
            continue
        log_p = levels[len(path)]
        for token in np.argsort(-log_p, kind="stable")[: min(k, nodes - len(paths))]:
            heapq.heappush(heap, (worth - log_p[token], len(paths)))
            paths.append((*path, int(token)))
    return paths


@pytest.mark.parametrize(("k", "nodes"), [(2, 12), (3, 9)])
def test_it_is_the_heap(k, nodes):
    expander = BestFirst(k, DEPTH, nodes)
    for seed in range(3):
        logits = np.random.default_rng(seed).normal(size=(B, DEPTH, V)).astype(np.float32) * 2
        tree = grown(expander, jnp.asarray(logits))
        well_formed(tree)
        for row in range(B):
            levels = [warpers.log_softmax(own.astype(np.float64)) for own in logits[row]]
            assert paths_of(tree, row) == by_heap(levels, k, nodes)


def test_it_is_the_published_tree():
    """Chances by depth 0.6 and 0.3, 0.5 and 0.4, 0.9 and 0.05; a budget of 8 nodes."""
    chances = np.full((B, 3, V), 1e-9, np.float32)
    for level, (first, second) in enumerate([(0.6, 0.3), (0.5, 0.4), (0.9, 0.05)]):
        chances[:, level, 1], chances[:, level, 2] = first, second
    tree = grown(BestFirst(2, 3, 8), jnp.log(chances))
    assert tree.tokens[0].tolist() == [0, 1, 2, 1, 2, 1, 2, 1]
    assert tree.parent[0].tolist() == [-1, 0, 0, 1, 1, 3, 3, 2]


def test_few_possible_tokens_leave_few_nodes():
    """Where a filter keeps one or two tokens, groups have as many real nodes; the others are invalid."""
    logits = np.random.default_rng(0).normal(size=(B, DEPTH, V)).astype(np.float32)
    tree = grown(BestFirst(3, DEPTH, 13), jnp.asarray(logits), "narrow")
    well_formed(tree)
    best = np.argsort(-logits, axis=2)
    assert [path for path in paths_of(tree, 0) if path is not None] == [tuple(best[0, :d, 0]) for d in range(DEPTH + 1)]
    for row in (1, 2):
        assert all(token in best[row, d, :2] for path in paths_of(tree, row) if path for d, token in enumerate(path))


def test_a_cut_tree_is_no_deeper():
    assert BestFirst(7, 15, 128).cut(2) == BestFirst(7, 2, 57) and BestFirst(7, 15, 128).cut(20).depth == 15


def test_levels_that_share_no_distribution_are_refused():
    """When the line is read or the drafter made, and not when a step is traced."""
    tree, message = "expander=best_first,k=2", "best_first takes drafters whose levels share one distribution"
    for line in (f"draft:{tree}", f"dspark:model=nowhere,{tree}", f"rasd:draft=(eagle3:{tree})"):
        with pytest.raises(ValueError, match=message) as caught:
            parse("drafter", REGISTRY, line)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        DSpark(BestFirst())
    assert DFlash(BestFirst()).expander == parse("drafter", REGISTRY, "dflash:expander=best_first").fields["expander"]


@dataclasses.dataclass(frozen=True)
class Noted(Expander):
    """A tree of two nodes in each of its first levels, which notes how many distributions they have."""

    found: list
    nodes, depth = 7, 3

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        def noted(carry, level):
            carry, logits = grow(carry, level)
            self.found.append((level.tokens.shape[1], logits.shape[1]))
            return carry, logits

        return TopK(k=2, depth=self.depth, nodes=self.nodes)(root, logits, noted, carry, sampler)


OF_TREES = {
    type(drafter): name
    for name, drafter in DRAFTERS.items()
    if isinstance(drafter, TreeDrafter)
    and "expander" in {field.name for field in dataclasses.fields(drafter)}
    and not isinstance(drafter, OmniDraft)  # which takes chains alone
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TREES.values())
def test_drafters_say_whether_levels_share_a_distribution(name):
    decoder, found = specjax.speculative(target_of(name), DRAFTERS[name].growing(Noted([]))), []
    drafter = decoder.drafter.growing(Noted(found))

    def propose(model):
        state = decoder.empty(model, 2, CAPACITY)
        view = View(state.tokens, state.length, ~state.done, state.cache, max_depth=3)
        sampler = Sampler(state.key, state.tokens, state.length, ~state.done, state.sampling)
        return drafter.propose(model, state.draft, view, sampler).tree

    jax.eval_shape(propose, params(name))
    counts = [own for nodes, own in found if nodes == 2]
    assert len(counts) == 2 and set(counts) <= {1, 2}
    assert drafter.shared == (counts == [1, 1])  # of some, only the first levels share one


@pytest.mark.parametrize("fields", [{"k": 1}, {"depth": 0}, {"nodes": 1}, {"k": 2, "depth": 2, "nodes": 8}])
def test_trees_that_cannot_be(fields):
    with pytest.raises(ValueError, match="best_first"):
        BestFirst(**fields)
