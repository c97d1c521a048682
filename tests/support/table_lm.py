"""A model that is a table, so that all of its texts can be enumerated."""

import dataclasses

import jax.numpy as jnp

from specjax.lm import BaseLM, Output


@dataclasses.dataclass(frozen=True)
class Table(BaseLM):
    """Logits by the last two tokens. Its cache has no named slots: the tokens that were read."""

    vocab_size: int = 4

    def init_cache(self, batch, capacity, dtype=None):
        return jnp.zeros((batch, capacity), jnp.float32)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        own = jnp.concatenate([jnp.zeros_like(cache[:, :1]), block.tokens.astype(jnp.float32)], axis=1)
        earlier = jnp.take_along_axis(cache, jnp.maximum(block.length - 1, 0)[:, None], axis=1)[:, 0]
        own = own.at[:, 0].set(jnp.where(block.length > 0, earlier, 0)).astype(jnp.int32)
        logits = params[own[:, :-1], own[:, 1:]]
        return Output(block.tokens.astype(jnp.float32), logits=logits if wants.logits else None)
