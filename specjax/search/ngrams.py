"""Shares of next tokens after a text's last tokens in a datastore, for only the few tokens that are asked for.

In the shape descriptions `R` denotes texts, `m` the tokens that are asked for, `L` the text buffer, `O` orders.
"""

import jax
import jax.numpy as jnp

from specjax.draft.rest import search

Array = jax.Array

WEIGHTS = 0.01, 0.04, 0.15, 0.18, 0.12
"""Weights of the shares after the last 1, 2, ... tokens (the released settings of arXiv:2405.18400). They sum to 0.5."""


def shares(store: dict[str, Array], tokens: Array, length: Array, asked: Array) -> Array:
    """`[R, m]` float32: the weighted sum over i of `P(v | the last i tokens)`, from counts; 0 for tokens that never came.

    A datastore is sorted by the tokens before each position, nearest first. So the places after some tokens lie side by
    side, and two searches count them. After `v` and those tokens lie the places where `v` came next. Hence no table of
    n-grams is needed, and the datastore of retrieval drafters serves.

    A datastore has no place after a document's last token. That token counts as the end of a context, but not as a next
    token.

    Args:
      store: from `specjax.draft.datastore.build`, with `tokens` and `suffixes`.
      tokens: `[R, L]` int32, texts; anything from `length` on.
      length: `[R]` int32.
      asked: `[R, m]` int32.
    """
    orders = len(WEIGHTS)
    back = length[:, None] - 1 - jnp.arange(orders)[None]
    recent = jnp.where(back >= 0, jnp.take_along_axis(tokens, jnp.maximum(back, 0), axis=1), -1)
    recent = jnp.pad(
        recent, ((0, 0), (0, 1)), constant_values=-1
    )  # as wide as with a next token, so that one program serves both
    contexts = _counts(store, recent, jnp.arange(1, orders + 1))
    rows, count = asked.shape
    grown = jnp.concatenate(
        [asked[:, :, None], jnp.broadcast_to(recent[:, None, :orders], (rows, count, orders))], axis=2
    )
    followed = _counts(store, grown.reshape(rows * count, -1), jnp.arange(2, orders + 2)).reshape(rows, count, orders)
    known = contexts[:, None] > 0
    share = jnp.where(known, followed / jnp.maximum(contexts[:, None], 1), 0.0)
    return (share * jnp.asarray(WEIGHTS, jnp.float32)[None, None]).sum(axis=2)


def _counts(store, recent, lengths) -> Array:
    """How many places of the store follow the nearest `lengths` `[O]` of the tokens `recent` `[R, O + 1]`, `[R, O]`."""
    compared = jnp.broadcast_to(jnp.repeat(lengths, 2)[None], (recent.shape[0], 2 * lengths.shape[0]))
    ends = search(store, recent, compared, (False, True) * lengths.shape[0])
    return (ends[:, 1::2] - ends[:, ::2]).astype(jnp.float32)
