"""The one door to tree attention: picks an implementation."""

from typing import Literal

import jax

from specjax.kernels.tree_attention import xla


def tree_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache_key: jax.Array | None,
    cache_value: jax.Array | None,
    length: jax.Array,
    *,
    visible: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    causal: bool = True,
    scale: float,
    window: int | None = None,
    implementation: Literal["xla"] | None = None,
) -> jax.Array:
    """Softmax attention of a block over each row's committed prefix and over the uncommitted keys.

    In the shape descriptions `T` denotes queries, `P` uncommitted keys before the block, `G` query heads per kv-head.

    Args:
      query: `[B, T, K * G, H]`.
      key: `[B, P + T, K, H]`, the uncommitted keys, in the cache's type.
      value: as `key`.
      cache_key: `[B, K, S, H]`, or None for no prefix.
      cache_value: as `cache_key`.
      length: `[B]` int32, visible cache slots a row; what finite numbers lie beyond never matters.
      visible: `[B, T, P + T]` bool, or None for `causal`/full.
      query_positions: `[B, T]` int32, read only under a `window`.
      key_positions: `[B, P + T]` int32, read only under a `window`.
      causal: without `visible`, whether a query sees later keys of its own block.
      scale: multiplies the scores.
      window: a query at position t sees keys at positions above t - window (sliding-window attention).
      implementation: None picks the best one here.

    Returns:
      `[B, T, K * G, H]` in the query's type. A query that sees nothing gets zeros.

    Raises:
      ValueError: on an unknown implementation.
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"tree_attention has no implementation {implementation!r}; choose 'xla' or None")
    return xla.tree_attention(
        query,
        key,
        value,
        cache_key,
        cache_value,
        length,
        visible=visible,
        query_positions=query_positions,
        key_positions=key_positions,
        causal=causal,
        scale=scale,
        window=window,
    )
