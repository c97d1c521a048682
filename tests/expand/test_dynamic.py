"""Trees whose shape rests on the draft: against a heap, a beam and a search by hand; the distribution stays the
target's."""

import dataclasses
import functools
import heapq
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import ALPHA, MODEL, sampled_p_value
from support.forests import written
from support.growth import B, V, by_hand, expand, paths_of, sampler_of, table, well_formed

from specjax.draft import ModelDrafter
from specjax.expand import DySpec, StochasticBeam, TopK
from specjax.expand.dynamic import Ranked
from specjax.reference import expand as host
from specjax.reference import rejection as oracle
from specjax.reference import warpers
from specjax.sampling import Sampler
from specjax.tree import Topology
from specjax.verify import GreedyMulti, Recursive, RecursiveWOR, Traversal

# ---- by hand ----------------------------------------------------------------------------------------------------------


@functools.cache
def noise(name, nodes, depth, once=False):
    sampler = sampler_of(name).once() if once else sampler_of(name)
    return np.asarray(sampler.children_noise(depth, nodes, V), np.float64)


def distribution_of(dists, row, name):
    return lambda path: warpers.log_softmax(by_hand(dists, row, name, False)(path)[0])


def heap(dists, row, name, k, depth, nodes):
    """The draws of the k nodes of every level whose turn is likeliest, and what a heap that opens one after the other keeps."""
    dist, children = distribution_of(dists, row, name), {}
    frontier = [((), 1.0)]
    for level in range(depth):
        found = []
        for place, (path, value) in enumerate(frontier):
            log_q, left, drawn = dist(path), 1.0, []
            ranked = log_q + noise(name, 1 if level == 0 else k, level, once=True)[row, place]
            for token in [t for t in np.argsort(-ranked, kind="stable")[:k] if ranked[t] > -np.inf]:
                drawn.append(((*path, int(token)), value * left, value * np.exp(log_q[token])))
                left -= np.exp(log_q[token])
            children[path] = drawn
            found += drawn
        found.sort(key=lambda each: -each[1])
        frontier = [(path, value) for path, _, value in found[:k]]
    kept, slots = [], [(-children[()][0][1], (), 0)]
    while slots and len(kept) < nodes - 1:
        _, above, rank = heapq.heappop(slots)
        path = children[above][rank][0]
        kept.append(path)
        for parent, place in ((above, rank + 1), (path, 0)):
            if place < len(children.get(parent, ())):
                heapq.heappush(slots, (-children[parent][place][1], parent, place))
    return kept, children


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampled", "narrow"])
@pytest.mark.parametrize("expander", [DySpec(k=3, depth=4, nodes=9), DySpec(k=5, depth=3, nodes=6)], ids=["few", "all"])
def test_dyspec_is_the_heap(expander, name):
    deepest = 0
    for seed in range(3):
        dists = table(seed)
        tree = expand(expander, jnp.asarray(dists), sampler_of(name), keep_q=True)
        well_formed(tree)
        for row in range(B):
            kept, children = heap(dists, row, name, expander.k, expander.depth, expander.nodes)
            paths = [path for path in paths_of(tree, row)[1:] if path is not None]
            assert sorted(paths) == sorted(kept)
            for above in {path[:-1] for path in paths}:  # siblings stand in the order of their draws
                mine = [path for path in paths if path[:-1] == above]
                assert mine == [path for path, *_ in children[above]][: len(mine)]
                node = paths_of(tree, row).index(above)
                dist = np.exp(distribution_of(dists, row, name)(above))
                np.testing.assert_allclose(np.exp(np.asarray(tree.log_q)[row, node]), dist, atol=1e-5)
            if expander.k >= expander.nodes - 1:  # no node was left unscored that the heap could have gone below
                assert all(path in children for path in paths if len(path) < expander.depth)
            deepest = max(deepest, *map(len, paths))
    assert deepest >= 3 or name == "narrow"


@pytest.mark.slow
@pytest.mark.parametrize("expander", [DySpec, StochasticBeam])
def test_greedy_rows_have_the_likeliest(expander):
    dists = jnp.asarray(table(1))
    if expander is DySpec:
        both = [
            expand(kind(k=3, depth=3, nodes=8, **own), dists, sampler_of("greedy"))
            for kind, own in ((DySpec, {}), (TopK, {"coupled": False}))
        ]
        for row in range(B):
            assert paths_of(both[0], row) == paths_of(both[1], row)
        return
    tree = expand(StochasticBeam(k=3, depth=2), dists, sampler_of("greedy"))
    for row in range(B):
        dist = distribution_of(np.asarray(dists), row, "greedy")
        paths = paths_of(tree, row)[1:]
        first = sorted(range(V), key=lambda t: -dist(())[t])[:3]
        both = {(a, b): dist(())[a] + dist((a,))[b] for a in first for b in range(V)}
        assert set(paths[:3]) == {(t,) for t in first}
        assert set(paths[3:]) == set(sorted(both, key=lambda path: -both[path])[:3])


@pytest.mark.parametrize("name", ["sampled", "narrow"])
def test_stochastic_beam_by_hand(name):
    """All V children of every beam, with the definition of a Gumbel whose maximum is known."""
    expander = StochasticBeam(k=3, depth=3)
    for seed in range(3):
        dists = table(seed)
        tree = expand(expander, jnp.asarray(dists), sampler_of(name), keep_q=True)
        well_formed(tree)
        for row in range(B):
            dist, beam, wanted, order = distribution_of(dists, row, name), [((), 0.0, 0.0)], [], {}
            for depth in range(3):
                found = []
                for place, (path, total, top) in enumerate(beam):
                    own = total + dist(path)
                    values = own + noise(name, len(beam) if depth == 0 else 3, depth)[row, place]
                    with np.errstate(divide="ignore"):
                        lower = -np.log(np.exp(-top) - np.exp(-values.max()) + np.exp(-values))
                    here = [((*path, t), own[t], lower[t]) for t in range(V) if values[t] > -np.inf]
                    order[path] = [child for child, *_ in sorted(here, key=lambda each: -each[2])]
                    found += here
                beam = sorted(found, key=lambda each: -each[2])[:3]
                wanted += [path for path, *_ in beam]
            paths = [path for path in paths_of(tree, row)[1:] if path is not None]
            assert sorted(paths) == sorted(wanted)
            for above in {path[:-1] for path in paths}:
                mine = [path for path in paths if path[:-1] == above]
                assert mine == order[above][: len(mine)]


@pytest.mark.slow
def test_opt_tree_has_the_most_expected_tokens_and_stops_where_a_level_adds_little():
    """Of every tree of four drafted nodes of the distributions' own chances, three levels; and by hand where it
    stops."""
    dist = table(2)
    tree = expand(TopK(k=4, depth=3, nodes=5, coupled=False), jnp.asarray(dist), sampler_of("greedy"))
    for row in range(B):
        worth = distribution_of(dist, row, "greedy")
        chance = {(): 1.0}
        for path in itertools.chain.from_iterable(itertools.product(range(V), repeat=n) for n in (1, 2, 3)):
            chance[path] = chance[path[:-1]] * np.exp(worth(path[:-1])[path[-1]])

        every = {frozenset({()})}
        for _ in range(4):
            every = {kept | {p} for kept in every for p in chance if p and p not in kept and p[:-1] in kept}
        assert len(every) == 4185  # of five nodes with six children each, but for the chains of four levels
        best = max(sum(chance[path] for path in kept) for kept in every)
        assert sum(chance[path] for path in paths_of(tree, row)) == pytest.approx(best, rel=1e-6)
    for threshold in (0.3, 0.6):
        expander, deep = TopK(k=4, depth=4, nodes=5, coupled=False, threshold=threshold), set()
        tree = expand(expander, jnp.asarray(dist), sampler_of("greedy"))
        for row in range(B):
            score = by_hand(dist, row, "greedy", False)
            sums = [
                sum(sorted(np.exp([c.total for c in host.eagle2_candidates(score, 4, depth)]))[-4:])
                for depth in range(1, 5)
            ]
            gains = np.diff([0.0, *sums])
            levels = next((d for d in range(1, 4) if gains[d - 1] <= threshold), 4)
            assert paths_of(tree, row) == host.eagle2(score, 4, levels, 5)[0]
            deep.add(levels)
        assert min(deep) < 4


# ---- the distribution
# ----------------------------------------------------------------------------------------------------------


def heaps(q, count):
    """All trees of a heap with `count` draws, by shape: the tokens and the chance of each."""
    found: dict[tuple, list] = {}

    def grow(parents, tokens, slots, chance):
        if len(parents) == count + 1:
            found.setdefault(parents, []).append((tokens, chance))
            return
        value, node, path, left = max(slots, key=lambda slot: slot[0])
        others = [slot for slot in slots if slot[1] != node]
        for token in np.flatnonzero(left):
            dist = left / left.sum()
            rest = np.where(np.arange(len(dist)) == token, 0, left)
            below = (*path, int(token))
            more = [(value * rest.sum() / left.sum(), node, path, rest)] if rest.any() else []
            if len(below) < len(q):
                more.append((value * dist[token], len(parents), below, q[len(below)][below]))
            grow((*parents, node), (*tokens, int(token)), [*others, *more], chance * dist[token])

    grow((-1,), (-1,), [(1.0, 0, (), q[0][()])], 1.0)
    return found


def heap_error(rule, count=4):
    rng = np.random.default_rng(4)
    p, q = ([rng.dirichlet(np.full(3, 0.7), (3,) * i) for i in range(n)] for n in (4, 3))
    dist, trees = 0.0, heaps(q, count)
    assert len(trees) > 3 and sum(chance for rows in trees.values() for _, chance in rows) == pytest.approx(1)
    for parents, rows in trees.items():
        topology = Topology(parents, (0,) * len(parents))
        dists = written(rule, topology, p, q, "without_replacement", np.array([tokens for tokens, _ in rows]))
        dist = dist + np.tensordot([chance for _, chance in rows], dists, 1)
    return np.abs(dist - oracle.joint(p)).max()


@pytest.mark.slow
def test_a_heap_of_draws_keeps_the_distribution():
    """Given what was drawn before, one more draw leaves the distribution of the text as it was: to stop or to go on is
    the same."""
    assert heap_error(RecursiveWOR()) < 1e-12
    assert heap_error(Traversal()) < 1e-12
    assert heap_error(Recursive(), 3) > 1e-3


class Picky(DySpec):
    """Keeps children for what they turned out to be."""

    def choose(self, *args, **options):
        found = super().choose(*args, **options)
        return Ranked(found.tokens, found.value, found.value)


class Same(Sampler):
    """One whose noise is the same in every step."""

    def once(self):
        return dataclasses.replace(self, length=jnp.zeros_like(self.length))


class Reused(DySpec):
    """Decides by draws further down whether a node has another child, and draws the same again in the next step."""

    def choose(self, sampler, *args, **options):
        fields = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
        return super().choose(Same(**fields), *args, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expander", "right"),
    [
        (DySpec(k=2, depth=2, nodes=4), True),
        (StochasticBeam(k=2, depth=2), True),
        (Picky(k=2, depth=2, nodes=3), False),
        (Reused(k=2, depth=2, nodes=4), False),
    ],
    ids=["dyspec", "stochastic_beam", "picky", "reused"],
)
def test_the_jitted_decoder(expander, right):
    """The joint distribution of three tokens by chi-square of 60,000 texts at 1e-3; see `verify/test_rejection.py`."""
    assert (sampled_p_value(ModelDrafter(MODEL.lm, expander), RecursiveWOR()) > ALPHA) is right


def test_what_may_judge_them():
    for expander in (DySpec(), StochasticBeam()):
        RecursiveWOR().check(ModelDrafter(MODEL.lm, expander))
        Traversal().check(ModelDrafter(MODEL.lm, expander))
        for rule in (Recursive(), GreedyMulti()):
            with pytest.raises(ValueError, match="cannot judge without_replacement children"):
                rule.check(ModelDrafter(MODEL.lm, expander))


@pytest.mark.parametrize(
    "bad", [lambda: DySpec(k=0), lambda: DySpec(nodes=1), lambda: StochasticBeam(k=0), lambda: TopK(threshold=-1.0)]
)
def test_bad_shapes(bad):
    with pytest.raises(ValueError, match=r"(dyspec|stochastic_beam|top_k) needs k, depth >= 1"):
        bad()
