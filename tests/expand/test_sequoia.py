"""The dynamic programme against every tree there is."""

import functools
import itertools

import numpy as np
import pytest

from specjax.expand import Static
from specjax.expand.search import search_tree
from specjax.expand.sequoia import expected, fastest_tree, sequoia_tree
from specjax.tree import Topology

DEPTH, RANKS, MOST = 3, 3, 6


@functools.cache
def every(depth, count):
    """All sets of `count` rank paths below a node, at most `depth` levels, first children first."""
    if count == 0:
        return ((),)
    if depth == 0:
        return ()
    found = []
    for children in range(1, min(RANKS, count) + 1):
        for sizes in itertools.product(range(1, count + 1), repeat=children):
            if sum(sizes) == count:
                for parts in itertools.product(*(every(depth - 1, size - 1) for size in sizes)):
                    found.append(tuple((r, *p) for r, part in enumerate(parts) for p in ((), *part)))
    return tuple(found)


def accuracies():
    rng = np.random.default_rng(0)
    for _ in range(6):
        yield rng.dirichlet(np.ones(RANKS + 1), DEPTH)[:, :RANKS]  # in any order
    yield np.asarray([[0.1, 0.6, 0.0], [0.05, 0.7, 0.1], [0.3, 0.3, 0.3]])
    yield np.zeros((DEPTH, RANKS))


def test_no_tree_of_its_size_has_more():
    assert [len(every(DEPTH, n)) for n in (1, 2, 3)] == [1, 2, 5]
    beaten = 0
    for accuracy in accuracies():
        for count in range(1, MOST + 1):
            tree = sequoia_tree(accuracy, 1 + count)
            best = max(expected(accuracy, paths) for paths in every(DEPTH, count))
            assert Static(tree).nodes == 1 + count and Topology.from_choices(tree).leaves_out_none
            assert expected(accuracy, tree) == pytest.approx(best, abs=1e-12)
            beaten += expected(accuracy, search_tree(accuracy, 1 + count)) < best - 1e-9
    assert beaten > 5  # one by one is not enough where a later rank is accepted more often


def test_it_is_the_step_by_step_tree_where_ranks_are_in_order():
    for accuracy in accuracies():
        ordered = -np.sort(-accuracy, axis=1)
        for nodes in (2, 5, 9):
            one, other = (expected(ordered, find(ordered, nodes)) for find in (sequoia_tree, search_tree))
            assert one == pytest.approx(other, abs=1e-12)


def test_the_fastest_tree_weighs_depth_and_size():
    accuracy = [[0.6, 0.2, 0.1]] * DEPTH
    for draft, slope in ((0.01, 0.01), (0.5, 0.01), (0.01, 0.5), (3.0, 0.0)):
        verify = [1 + slope * n for n in range(MOST + 1)]
        speed = lambda paths, draft=draft, verify=verify: (
            (1 + expected(accuracy, paths)) / (max(map(len, paths)) * draft + verify[len(paths)])
        )
        best = max(speed(paths) for n in range(1, MOST + 1) for paths in every(DEPTH, n))
        assert speed(fastest_tree(accuracy, draft, verify)) == pytest.approx(best, abs=1e-12)
    assert fastest_tree(accuracy, 3.0, [1.0] * 7) == ((0,), (1,), (2,))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="1 levels of 2 candidates make 2 to 3 nodes, not 4"):
        sequoia_tree([[0.5, 0.1]], 4)
    with pytest.raises(ValueError, match="times above 0"):
        fastest_tree([[0.5, 0.1]], 0.0, [1.0, 1.0])
    with pytest.raises(ValueError, match="accuracy must be"):
        sequoia_tree([[0.9, 0.2]], 2)
