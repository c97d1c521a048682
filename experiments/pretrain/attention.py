"""Self-attention with a hand-written gradient: what training on a CPU spends most of its time on.

The library's attention serves ragged prefixes and trees; its gradient is what `jax.grad` makes of it, and slower.
`swapped_in` puts this one in its place while the training step is traced.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from specjax.models import llama

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_MASKED = -1e30


@jax.custom_vjp
def _attend(query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array) -> jax.Array:
    return _forward(query, key, value, visible)[0]


def _forward(query, key, value, visible):
    scores = jnp.where(visible, _dot("bkth,bksh->bkts", query, key), _MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = _dot("bkts,bksh->bkth", weights, value)
    return out, (query, key, value, weights, out)


def _backward(kept, grad):
    query, key, value, weights, out = kept
    of_weights = _dot("bkth,bksh->bkts", grad, value)
    of_scores = weights * (of_weights - jnp.sum(grad * out, axis=-1, keepdims=True))
    return (
        _dot("bkts,bksh->bkth", of_scores, key),
        _dot("bkts,bkth->bksh", of_scores, query),
        _dot("bkts,bkth->bksh", weights, grad),
        None,
    )


_attend.defvjp(_forward, _backward)


def dense_attention(
    query,
    key,
    value,
    cache_key,
    cache_value,
    length,
    *,
    scale: float,
    causal: bool,
    ahead: jax.Array | None = None,
    **ignored,
) -> jax.Array:
    """`tree_attention` for the cases of training: no prefix, no past, no window; causal, or with `ahead` tokens to the
    right in view (None: all of them).

    The query heads of a kv-head are folded into its rows, so that every product is one plain matrix product.
    """
    batch, block, heads, width = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    folded = query.reshape(batch, block, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, group * block, width) * scale
    at = jnp.arange(block)
    right = 0 if causal else block if ahead is None else ahead
    visible = jnp.tile(at[None, :] - at[:, None] <= right, (group, 1))
    out = _attend(folded, key.swapaxes(1, 2), value.swapaxes(1, 2), visible)
    out = out.reshape(batch, kv_heads, group, block, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, block, heads, width)


@contextlib.contextmanager
def swapped_in(ahead: jax.Array | None = None) -> Iterator[None]:
    """Models traced inside use `dense_attention`; those that look ahead see `ahead` tokens to the right (None: all)."""
    before = llama.tree_attention
    llama.tree_attention = functools.partial(dense_attention, ahead=ahead)
    try:
        yield
    finally:
        llama.tree_attention = before
