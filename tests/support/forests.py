"""Every draft of a small tree, judged with every outcome of every test: the exact distribution of what a rule that goes
down writes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.reference import rejection as oracle
from specjax.tree import Topology, Tree
from specjax.verify import Traversal
from specjax.verify.top_down import TopDown, descend
from specjax.verify.traversal import climb


def drafts(topology: Topology, q, children: str, every=range):
    """All fillings of a tree `[M, N]` (-1: none is left to draw) and the chance of each, given distributions by
    context.

    `children` is one of `specjax.tree.Children`; where there is no distribution of them, "deterministic", all fillings
    count alike.
    """
    vocab = q[0].shape[-1]
    rows = [((-1,) * len(topology.parents), 1.0)]
    for node in range(1, len(topology.parents)):
        grown = []
        for tokens, chance in rows:
            path = path_of(topology, tokens, topology.parents[node])
            if path is None:
                grown.append((tokens, chance))
                continue
            dist = q[len(path)][path].copy()
            elder = [tokens[n] for n in range(1, node) if topology.parents[n] == topology.parents[node]]
            if children == "without_replacement":
                dist[[token for token in elder if token >= 0]] = 0
                if dist.sum() == 0:
                    grown.append((tokens, chance))
                    continue
            if children == "greedy":
                later = topology.parents[node + 1 :].count(topology.parents[node])
                dist = only(dist, len(elder)) if later else rest_of(dist, len(elder))
                if dist.sum() == 0:
                    grown.append((tokens, chance))
                    continue
            dist = np.full(vocab, 1 / vocab) if children == "deterministic" else dist / dist.sum()
            grown += [
                ((*tokens[:node], token, *tokens[node + 1 :]), chance * dist[token]) for token in np.flatnonzero(dist)
            ]
        rows = grown
    return np.array([tokens for tokens, _ in rows]), np.array([chance for _, chance in rows])


def only(dist, rank):
    """Of a distribution the token of a rank alone, if it is possible."""
    return np.where(np.arange(len(dist)) == np.argsort(-dist, kind="stable")[rank], dist, 0)


def rest_of(dist, count):
    """A distribution without its `count` likeliest tokens."""
    return np.where(np.isin(np.arange(len(dist)), np.argsort(-dist, kind="stable")[:count]), 0, dist)


def path_of(topology, tokens, node):
    """The tokens that lead to a node, None where one of them is missing."""
    path = ()
    while node > 0:
        path, node = (tokens[node], *path), topology.parents[node]
    return None if -1 in path else tuple(int(token) for token in path)


@functools.partial(jax.jit, static_argnums=(0, 1))
def judge(rule, topology, p, log_q, tokens, uniforms, order):
    valid = (tokens >= 0).at[:, 0].set(True)
    tree = Tree.of(topology, tokens, valid, log_q=log_q)
    if isinstance(rule, Traversal):
        return climb(p, tree, uniforms), order
    if isinstance(rule, TopDown) and order is None:
        order = rule.order(tree, None)
    return descend(rule, p, tree, uniforms, order), order


def judged(rule, topology, p, q, children, tokens, order=None):
    """Of every way down through fillings `[M, N]` its filling, its chance there, and where it ends."""
    patterns = np.array(list(itertools.product([0.0, 1.0], repeat=tokens.shape[1] - 1)))
    of = np.repeat(np.arange(len(tokens)), len(patterns))
    uniforms = np.pad(np.tile(patterns, (len(tokens), 1)), ((0, 0), (1, 0)))
    size = len(q[0]) ** (tokens.shape[1] - 1) * len(patterns)  # one shape for all distributions of a tree
    dists = [distributions_at(topology, tokens, tables) for tables in (p, q)]
    if children == "greedy":
        for node in range(tokens.shape[1]):
            left = [rest_of(dist, max(topology.parents.count(node) - 1, 0)) for dist in dists[1][:, node]]
            dists[1][:, node] = [dist / max(dist.sum(), 1e-300) for dist in left]
    known = jax.tree.map(lambda x: np.resize(x[of], (size, *x.shape[1:])), (*dists, tokens))
    if order is None and not isinstance(rule, TopDown):
        levels = np.argsort(topology.depths, kind="stable")
        order = np.arange(tokens.shape[1])[1:] if isinstance(rule, Traversal) else levels[1:]
    if order is not None:
        order = jnp.broadcast_to(jnp.asarray(order)[None], (size, len(order)))
    with jax.enable_x64(True):
        with np.errstate(divide="ignore"):
            log_q = None if children == "deterministic" else jnp.asarray(np.log(known[1]))
        found, order = judge(
            rule,
            topology,
            jnp.asarray(known[0]),
            log_q,
            jnp.asarray(known[2]),
            jnp.asarray(np.resize(uniforms, (size, uniforms.shape[1]))),
            order,
        )
        found, order = jax.tree.map(lambda x: np.asarray(x)[: len(of)], (found, order))
    assert found.weights.dtype == np.float64
    tried = ~np.isnan(found.chances)
    passes = np.take_along_axis(uniforms, order, axis=1) == 0
    each = np.where(tried, np.where(passes, found.chances, 1 - found.chances), passes)  # what is not tried counts once
    assert np.nanmax(found.chances) <= 1 and np.nanmin(found.chances) >= 0
    return of, each.prod(axis=1), found


def distributions_at(topology, tokens, tables):
    """The distribution at every node `[M, N, V]`, by the path that leads there; uniform where there is none."""
    vocab = tables[0].shape[-1]
    out = np.full((*tokens.shape, vocab), 1 / vocab)
    for row, text in enumerate(tokens):
        for node in range(tokens.shape[1]):
            path = path_of(topology, text, node)
            if path is not None and len(path) < len(tables):
                out[row, node] = tables[len(path)][path]
    return out


def distribution_error(rule, topology, p, q, children, order=None):
    """How far the joint distribution of len(p) tokens is from the target's; texts that come out short go on with p.

    Of children that are taken as they are, the largest distance over all fillings: each must keep the distribution by
    itself.
    """
    tokens, chance = drafts(topology, q, children)
    dists = written(rule, topology, p, q, children, tokens, order)
    joint = oracle.joint(p)
    if children == "deterministic":
        return np.abs(dists - joint).max()
    return np.abs(np.tensordot(chance, dists, 1) - joint).max()


def written(rule, topology, p, q, children, tokens, order=None):
    """The joint distribution `[M, V, ...]` of len(p) tokens for every filling `[M, N]`; texts that come out short go on
    with p."""
    of, ways, found = judged(rule, topology, p, q, children, tokens, order)
    dists = np.zeros((len(tokens), *p[-1].shape))
    for row in np.flatnonzero(ways):
        path = path_of(topology, tokens[of[row]], found.node[row])
        assert len(path) == found.accepted[row]
        rest = found.weights[row] / found.weights[row].sum()
        for table in p[len(path) + 1 :]:
            rest = rest[..., None] * table[path]
        dists[(of[row], *path)] += ways[row] * rest
    return dists


def accepted(rule, topology, p, q, children, order=None):
    """The mean number of kept tokens."""
    tokens, chance = drafts(topology, q, children)
    of, ways, found = judged(rule, topology, p, q, children, tokens, order)
    return float((chance[of] * ways) @ found.accepted)
