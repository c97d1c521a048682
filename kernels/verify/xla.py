"""The argmax over the vocabulary block by block, in plain XLA; only one block's noise is in memory.

The vocabulary is divided into `R` runs of equal length, and a block takes some columns of every run. So if a mesh
splits the vocabulary, each device goes through its own runs, and only R partial results cross devices.
"""

import math

import jax
import jax.numpy as jnp

from specjax.kernels.verify.gumbel import gumbel_noise

ELEMENTS = 2**19
"""Scores in a block, unless `block` gives the number of columns."""
RUNS = 16
"""The number of runs, if it divides the vocabulary; any power of two up to it can split the vocabulary."""


def argmax(scores, words, which, noisy, columns, *, block=None):
    """See `api.partial_argmax`.

    Args:
      scores: `[B, N, V]` float32.
      words: `[B, C, 2]` uint32.
      which: `[B, N]` int32.
      noisy: `[B]` bool.
      columns: `[V]` int32 or None.
      block: columns at a time; None: as many as give `ELEMENTS` scores.
    """
    batch, nodes, vocab = scores.shape
    runs = math.gcd(vocab, RUNS)
    width = vocab // runs
    size = min(max((block or max(ELEMENTS // (batch * nodes), 128)) // runs, 1), width)
    scores = scores.reshape(batch, nodes, runs, width)
    shared = nodes > words.shape[1]
    if not shared:  # as many keys as nodes: each node has its own noise, without a look-up
        words = jnp.take_along_axis(words, which[:, :, None], axis=1)
    first, second = words[:, :, None, None, 0], words[:, :, None, None, 1]
    noisy = noisy[:, None, None, None]
    first_of_run = width * jnp.arange(runs, dtype=jnp.int32)[:, None]

    def read(start):
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim - 1)
        at = first_of_run + start + jnp.arange(size, dtype=jnp.int32)[None]
        ids = at if columns is None else part(columns.reshape(runs, width))
        noise = gumbel_noise(first, second, ids[None, None])
        if shared:  # the barrier keeps XLA from recomputing a key's noise for each of its nodes
            noise = jax.vmap(lambda noise, which: noise[which])(jax.lax.optimization_barrier(noise), which)
        piece = part(scores)
        total = jnp.where(noisy, piece + noise, piece)
        total = jnp.where(jnp.isnan(total), jnp.inf, total)  # on a CPU, XLA's maximum over many numbers may lose a NaN
        peak = total.max(axis=-1)
        return peak, jnp.where(total == peak[..., None], at[None, None], vocab).min(axis=-1)

    def add(i, carry):
        # the last block may overlap the previous one: seeing a column twice changes nothing
        peak, index = read(jnp.minimum(i * size, width - size))
        new = jnp.maximum(carry[0], peak)
        return new, jnp.minimum(jnp.where(carry[0] == new, carry[1], vocab), jnp.where(peak == new, index, vocab))

    if size == width:
        peak, index = read(0)
    else:
        nothing = jnp.full((batch, nodes, runs), -jnp.inf), jnp.full((batch, nodes, runs), vocab)
        peak, index = jax.lax.fori_loop(0, -(-width // size), add, nothing)
    return merge(peak, index)


def merge(peak, index):
    """The lowest index `[B, N]` with the largest of partial peaks `[B, N, R]`, and that peak."""
    top = peak.max(axis=-1)
    index = jnp.where(peak == top[..., None], index, jnp.iinfo(jnp.int32).max).min(axis=-1)
    return index, top
