"""The mean of a model's hidden states over a text, a vector that tells which texts are alike.

In the shape descriptions `B` denotes rows, `W` the columns of texts, `E` the model width.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Wants
from specjax.settings import settled
from specjax.sharding.distributed import to_host

Array = jax.Array
ROOM = 64
"""Texts are read in a multiple of so many columns, so that few programs are compiled."""


def hidden_means(model: Any, texts: Sequence[Sequence[int]], rows: int) -> np.ndarray:
    """`[N, E]` float64: the mean over every text of the hidden states before the head; 0 for an empty one.

    Args:
      model: a `specjax.models.Model` without an encoder.
      texts: N texts as token ids.
      rows: B, how many are read side by side.
    """
    width = -(-max(map(len, texts), default=1) // ROOM) * ROOM
    found = []
    for at in range(0, len(texts), rows):
        part = texts[at : at + rows]
        tokens, counts = np.zeros((rows, max(width, ROOM)), np.int32), np.zeros(rows, np.int32)
        for row, ids in enumerate(part):
            tokens[row, : len(ids)], counts[row] = ids, len(ids)
        means = to_host(_means(model.lm, model.params, *jax.device_put((tokens, counts))))
        found.append(means[: len(part)].astype(np.float64))
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=0)
@settled
def _means(lm, params, tokens: Array, counts: Array):
    """`[B, E]` float32, the means over the first `counts` `[B]` of the tokens `[B, W]`."""
    batch, width = tokens.shape
    cache = lm.init_cache(batch, width, jax.tree.leaves(params)[0].dtype)
    places = jnp.arange(width)[None]
    block = Block(tokens, jnp.broadcast_to(places, tokens.shape), jnp.zeros(batch, jnp.int32))
    hidden = lm(params, block, cache, wants=Wants(final=True)).final.astype(jnp.float32)
    sums = jnp.sum(jnp.where((places < counts[:, None])[:, :, None], hidden, 0.0), axis=1)
    return sums / jnp.maximum(counts, 1)[:, None]
