"""JetSpec's tree, of levels that share a distribution: against a heap, and against what its authors' program builds."""

import heapq

import jax.numpy as jnp
import numpy as np
import pytest
from support.growth import B, V, expand, paths_of, sampler_of, table, well_formed

from specjax.expand import BestFirst
from specjax.reference import warpers

DEPTH = 4


def grown(expander, logits, name="greedy"):
    """The tree of a drafter whose levels have the logits `[B, D, V]`, whatever their nodes."""
    grow = lambda carry, level: (carry, logits[:, level.depth][:, None])
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


@pytest.mark.parametrize(("k", "nodes"), [(2, 12), (3, 9), (5, 30)])
def test_it_is_the_heap(k, nodes):
    expander = BestFirst(k, DEPTH, nodes, coupled=False)
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
    tree = grown(BestFirst(2, 3, 8, coupled=False), jnp.log(chances))
    assert tree.tokens[0].tolist() == [0, 1, 2, 1, 2, 1, 2, 1]
    assert tree.parent[0].tolist() == [-1, 0, 0, 1, 1, 3, 3, 2]


def test_levels_that_share_no_distribution_are_refused():
    with pytest.raises(ValueError, match="best_first takes drafters whose levels share one distribution"):
        expand(BestFirst(2, 3, 8), jnp.asarray(table(0)), sampler_of("greedy"))


@pytest.mark.parametrize("fields", [{"k": 1}, {"depth": 0}, {"nodes": 1}, {"k": 2, "depth": 2, "nodes": 8}])
def test_trees_that_cannot_be(fields):
    with pytest.raises(ValueError, match="best_first"):
        BestFirst(**fields)
