"""A model's logits of whole texts, to compare with another library's."""

import functools

import jax
import jax.numpy as jnp

from specjax.lm import Block, Wants


@functools.partial(jax.jit, static_argnums=0)
def logits(lm, params, ids):
    """`[B, T, V]`, of texts `ids` `[B, T]` in one pass without a cache."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    block = Block(jnp.asarray(ids, jnp.int32), positions, jnp.zeros(len(ids), jnp.int32))
    return lm(params, block, None, wants=Wants(logits=True)).logits
