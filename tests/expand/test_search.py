"""Searched trees: as good as the best of all trees, and grown the way the rule says."""

import numpy as np
import pytest

from specjax.expand import Static
from specjax.expand.search import chance, search_tree


def random_shares(rng, depth, ranks, sort=True):
    shares = rng.dirichlet(np.ones(ranks + 1), depth)[:, :ranks]
    return -np.sort(-shares, axis=1) if sort else shares


def worth(accuracy, tree):
    return sum(chance(accuracy, path) for path in tree)


def all_trees(depth, ranks, size):
    """Every prefix-closed set of `size` paths whose siblings have consecutive ranks."""
    trees = {frozenset()}
    for _ in range(size):
        grown = set()
        for tree in trees:
            for above in {(), *tree}:
                if len(above) < depth:
                    rank = sum(len(path) == len(above) + 1 and path[:-1] == above for path in tree)
                    if rank < ranks:
                        grown.add(tree | {(*above, rank)})
        trees = grown
    return trees


@pytest.mark.parametrize("nodes", [2, 4, 6, 7])
def test_no_tree_accepts_more(nodes):
    rng = np.random.default_rng(nodes)
    for _ in range(5):
        accuracy = random_shares(rng, 3, 3)
        best = max(worth(accuracy, tree) for tree in all_trees(3, 3, nodes - 1))
        found = search_tree(accuracy, nodes)
        assert len(set(found)) == nodes - 1
        assert worth(accuracy, found) == pytest.approx(best)


def test_it_adds_the_likeliest_neighbour_even_where_ranks_are_out_of_order():
    """The rule step by step: a path waits for its first child or next sibling to be the likeliest of all that wait."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        accuracy = random_shares(rng, 4, 5, sort=False)
        chosen = [(0,)]
        while len(chosen) < 12:
            near = {(*path[:-1], path[-1] + 1) for path in chosen if path[-1] < 4}
            near |= {(*path, 0) for path in chosen if len(path) < 4}
            chosen.append(max(near - set(chosen), key=lambda path: chance(accuracy, path)))
        assert set(search_tree(accuracy, 13)) == set(chosen)


def test_a_found_tree_is_an_expander():
    choices = search_tree([[0.6, 0.2, 0.11], [0.5, 0.2, 0.1]], 6)
    assert choices == ((0,), (1,), (2,), (0, 0), (0, 1))
    assert Static(choices).nodes == 6
    assert len(search_tree([[0.5, 0.1]] * 2, 7)) == 6  # all there is


@pytest.mark.parametrize("nodes", [1, 8])
def test_sizes_that_do_not_fit_are_refused(nodes):
    with pytest.raises(ValueError, match="2 to 7 nodes"):
        search_tree([[0.5, 0.1]] * 2, nodes)


@pytest.mark.parametrize("accuracy", [[0.5, 0.2], [[0.9, 0.2]], [[-0.1, 0.2]], [[np.nan]], np.zeros((0, 3))])
def test_what_is_no_share_is_refused(accuracy):
    with pytest.raises(ValueError, match="shares"):
        search_tree(accuracy, 2)
