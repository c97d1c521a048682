"""The one door to tree attention: picks an implementation."""

import functools
from typing import Literal

import jax

from specjax.kernels.tree_attention import blocked, xla


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
    implementation: Literal["xla", "blocked"] | None = None,
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
      implementation: `xla` scores prefix and block in one piece. `blocked` reads only the used blocks of the cache; without
        a cache, or to be differentiated in reverse, use `xla`. None picks `blocked` for a cache on a CPU, else `xla`.

    Returns:
      `[B, T, K * G, H]` in the query's type. A query that sees nothing gets zeros.

    Raises:
      ValueError: on an unknown implementation, or `blocked` without a cache.
    """
    options = {
        "visible": visible,
        "query_positions": query_positions,
        "key_positions": key_positions,
        "causal": causal,
        "scale": scale,
        "window": window,
    }
    whole, blocks = (functools.partial(kind.tree_attention, **options) for kind in (xla, blocked))
    if implementation not in (None, "xla", "blocked"):
        raise ValueError(f"tree_attention has no implementation {implementation!r}; choose 'xla', 'blocked' or None")
    if cache_key is None or implementation == "xla":
        if implementation == "blocked":
            raise ValueError("blocked tree attention reads a cache, and there is none: choose 'xla' or None")
        return whole(query, key, value, cache_key, cache_value, length)
    operands = query, key, value, cache_key, cache_value, length
    if implementation == "blocked":
        return blocks(*operands)
    return jax.lax.platform_dependent(*operands, cpu=blocks, default=whole)
