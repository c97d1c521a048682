"""The one door to tree attention: picks an implementation."""

import functools
from typing import Literal

import jax

from specjax.kernels.tree_attention import blocked, xla
from specjax.kernels.tree_attention.parts import grouped, own_visible, ungrouped


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
      implementation: `xla` scores prefix and block in one piece, `blocked` reads only the used blocks of the cache. None
        picks `blocked` for a cache on a CPU, else `xla`. Both can be differentiated.

    Returns:
      `[B, T, K * G, H]` in the query's type. A query that sees nothing gets zeros.

    Raises:
      ValueError: on an unknown implementation, or `blocked` without a cache.
    """
    if implementation not in (None, "xla", "blocked"):
        raise ValueError(f"tree_attention has no implementation {implementation!r}; choose 'xla', 'blocked' or None")
    if implementation == "blocked" and cache_key is None:
        raise ValueError("blocked tree attention reads a cache, and there is none: choose 'xla' or None")
    visible = own_visible(query.shape[1], key.shape[1], visible, query_positions, key_positions, causal, window)
    operands = (
        grouped(query, key.shape[2]), key.swapaxes(1, 2), value.swapaxes(1, 2), cache_key, cache_value, length, visible,
        query_positions,
    )  # fmt: skip
    kind = "xla" if cache_key is None else implementation
    return ungrouped(attend_with(kind, *operands, scale=scale, window=window), query)


def attend_with(implementation, *operands, scale, window):
    """Attention of grouped queries.

    Args:
      implementation: see `tree_attention`; not None without a cache.
      *operands: queries `[B, K, T * G, H]`, keys and values `[B, K, P + T, H]`, those of the cache `[B, K, S, H]` or None,
        `length` `[B]`, who sees whom `[B or 1, T or 1, P + T]`, and query positions `[B, T]` or None.
      scale: see `tree_attention`.
      window: likewise.

    Returns:
      `[B, K, T * G, H]` float32.
    """
    whole = functools.partial(xla.attend, scale=scale, window=window)
    if implementation == "xla":
        return whole(*operands)
    # a loop of traced length has no reverse derivative, and the whole has the same one
    blocks = jax.custom_jvp(functools.partial(blocked.attend, scale=scale, window=window))
    blocks.defjvp(lambda primals, tangents: jax.jvp(whole, primals, tangents))
    if implementation == "blocked":
        return blocks(*operands)
    return jax.lax.platform_dependent(*operands, cpu=blocks, default=whole)
