"""Expanders driven by distributions that are a fixed random function of a node's path, and the same distributions for
oracles by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.reference import trees, warpers
from specjax.sampling import Sampler, SamplingArrays
from specjax.sampling.noise import gumbel

V, B, DEEPEST = 6, 3, 4
WEIGHTS = (V + 1) ** np.arange(DEEPEST)  # a path (t1, t2, ...) is the number sum (t_d + 1) (V + 1)^(d - 1)
TEXT = np.array([[1, 2, 3, 0, 0, 0, 0, 0], [5, 5, 1, 2, 0, 4, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0]])
LENGTHS = np.array([3, 6, 1])
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": [1.0, 0.6, 1.5]},
    "mixed": {"temperature": [0.0, 1.0, 0.7], "top_k": [0, 3, 2], "repetition_penalty": [1.5, 0.7, 1.0]},
    "narrow": {"temperature": 1.0, "top_k": [1, 2, 2]},
}


def table(seed):
    """Logits `[B, paths, V]` after every path."""
    return np.random.default_rng(seed).normal(size=(B, WEIGHTS.sum() * V + 1, V)).astype(np.float32) * 2


def make_grow(dists):
    """A drafter whose distribution is looked up by path. The path is read twice, through `parent` and through
    `visible`; where the two disagree the logits are NaN."""

    def grow(carry, level):
        tokens, depths, codes = carry
        rows, width = level.tokens.shape
        own = (level.tokens + 1) * int(WEIGHTS[level.depth - 1])
        above = jnp.concatenate([jnp.zeros((rows, 1), own.dtype), codes], axis=1)
        code = jnp.take_along_axis(above, level.parent + 1, axis=1) + own
        tokens = jnp.concatenate([tokens, level.tokens], axis=1)
        depths = (*depths, *[level.depth] * width)
        worth = (tokens + 1) * jnp.asarray(WEIGHTS)[jnp.asarray(depths) - 1][None]
        assert level.visible.shape[1:] == (width, tokens.shape[1])
        seen = jnp.where(level.visible, worth[:, None], 0).sum(axis=2)
        logits = jnp.take_along_axis(dists, code[:, :, None], axis=1)
        return (tokens, depths, jnp.concatenate([codes, code], axis=1)), jnp.where(
            (code == seen)[..., None], logits, jnp.nan
        )

    return grow


@functools.partial(jax.jit, static_argnames=("expander", "keep_q"))
def expand(expander, dists, sampler, keep_q=False):
    empty = jnp.zeros((B, 0), jnp.int32)
    root = jnp.asarray(TEXT[np.arange(B), LENGTHS - 1], jnp.int32)
    return expander(root, dists[:, 0], make_grow(dists), (empty, (), empty), sampler, keep_q=keep_q)


def sampler_of(name):
    return Sampler(
        jax.random.split(jax.random.key(3), B),
        jnp.asarray(TEXT),
        jnp.asarray(LENGTHS),
        jnp.ones(B, bool),
        SamplingArrays.make(B, **SETTINGS[name]),
    )


NOISE = np.asarray(
    gumbel(sampler_of("greedy").key, jnp.asarray(LENGTHS)[:, None] + jnp.arange(DEEPEST)[None], V), np.float64
)


def by_hand(dists, row, name, coupled, tau=1.0):
    """The row's `score` for the oracles: penalty over text and path, warpers, and the depth's noise if coupled."""
    option = {key: np.broadcast_to(value, B)[row] for key, value in SETTINGS[name].items()}
    heat = option.get("temperature", 0.0)

    def score(path):
        code = sum((token + 1) * WEIGHTS[depth] for depth, token in enumerate(path))
        seen = [*TEXT[row, : LENGTHS[row]], *path]
        scores = warpers.repetition_penalty(dists[row, code], seen, option.get("repetition_penalty", 1.0))
        scores = warpers.warp(scores, heat, option.get("top_k", 0))
        if coupled and heat > 0:
            scores = scores + NOISE[row, len(path)]
        return scores, warpers.log_softmax(scores / tau)

    return score


def paths_of(tree, row):
    """Each valid node's tokens below the root, through `parent`; None for the others."""
    parent, tokens = np.asarray(tree.parent)[row], np.asarray(tree.tokens)[row]
    lines = [trees.path_to(parent, node)[1:] for node in range(tree.nodes)]
    return [
        tuple(tokens[line].tolist()) if ok else None
        for line, ok in zip(lines, np.asarray(tree.valid)[row], strict=True)
    ]


def well_formed(tree):
    parent, depth, valid = (np.asarray(x) for x in (tree.parent, tree.depth, tree.valid))
    assert (parent[:, 0] == -1).all() and (depth[:, 0] == 0).all() and valid[:, 0].all()
    assert ((parent[:, 1:] >= 0) & (parent[:, 1:] < np.arange(1, tree.nodes))).all()
    above = np.take_along_axis(valid, np.maximum(parent, 0), axis=1)
    assert above[valid].all() and (np.asarray(tree.tokens)[~valid] == -1).all()
    np.testing.assert_array_equal(
        depth[:, 1:][valid[:, 1:]], np.take_along_axis(depth, np.maximum(parent, 0), 1)[:, 1:][valid[:, 1:]] + 1
    )
    assert depth.max() <= tree.max_depth
