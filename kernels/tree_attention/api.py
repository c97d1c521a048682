"""The entry point of tree attention, which chooses an implementation."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import QUERIES, chunked
from specjax.kernels.tree_attention import lowered, unrolled, xla
from specjax.kernels.tree_attention import split as ring
from specjax.kernels.tree_attention.mapped import over_slots
from specjax.kernels.tree_attention.parts import Operands, grouped, of_queries, own_visible, ungrouped
from specjax.kernels.tree_attention.unrolled import Unrolled

Implementation = Literal[
    "xla",
    "blocked",
    "pallas",
    "mosaic_gpu",
    "pallas_tpu_interpreted",
    "pallas_gpu_interpreted",
    "mosaic_gpu_interpreted",
]
INTERPRETED = {
    "pallas_tpu_interpreted": ("pallas", "tpu"),
    "pallas_gpu_interpreted": ("pallas", "cuda"),
    "mosaic_gpu_interpreted": ("mosaic_gpu", "cuda"),
}
"""For each kernel in an interpreter: the implementation, and the platform whose kernel it is."""


@jax.named_scope("tree_attention")
def tree_attention(
    query: jax.Array, key: jax.Array, value: jax.Array | None, cache_key: jax.Array | None, cache_value: jax.Array | None,
    length: jax.Array, *, visible: jax.Array | Unrolled | None = None, query_positions: jax.Array | None = None,
    key_positions: jax.Array | None = None, cache_positions: jax.Array | None = None, unseen: jax.Array | None = None,
    causal: bool = True, split: bool = False, scale: float, window: int | None = None, soft_cap: float | None = None,
    key_scale: jax.Array | None = None, value_scale: jax.Array | None = None, sinks: jax.Array | None = None,
    distances: jax.Array | None = None, implementation: Implementation | Callable[..., jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """Softmax attention of a block over each row's committed prefix and over the uncommitted keys.

    In the shape descriptions `T` denotes queries, `P` uncommitted keys before the block, `G` query heads per kv-head.

    Args:
      query: `[B, T, K * G, H]`.
      key: `[B, P + T, K, H]`, the uncommitted keys, in the cache's type.
      value: as `key`, or `[B, P + T, K, W]` with values of another width. None: values are the keys, also in the cache, which
        is read once for both (`specjax.models.latent`).
      cache_key: `[B, K, S, H]`, or None for no prefix.
      cache_value: as `cache_key`, with the width of `value`; None with it.
      length: `[B]` int32, visible cache slots per row; finite numbers beyond it have no effect.
      visible: `[B or 1, T or 1, P + T]` bool; None for `causal`/full; or, without a cache, `Unrolled` for repeated
        passes over the same slots.
      query_positions: `[B, T]` int32, read under a `window` and with `distances`: where the queries' windows end. With the
        ends of the queries' chunks of `window` positions, a causal query sees the keys of its own chunk.
      key_positions: `[B, P + T]` int32, read under a `window` and with `distances`.
      cache_positions: `[B, S]` int32, the positions of slots below `length` in a ring (`specjax.models.kv`), under a `window`.
      unseen: `[B, S]` bool, cache slots below `length` that no query sees: holes for which the block has newer keys.
      causal: without `visible`, whether a query sees later keys of its own block.
      split: whether the ambient mesh may split the queries over its axis `context`; only without `visible`. If it does and
        divides T and S, keys and cache go round a ring in XLA, whatever the implementation, and there is no gradient.
      scale: the factor of the scores.
      window: a query at position t sees keys at positions above t - window (sliding-window attention).
      soft_cap: keeps the scores within this distance of zero, by a tanh (Gemma 2).
      key_scale: `[B, K G, S]`, the factors of the numbers of an int8 or fp8 `cache_key`, one for each of G equal parts of a
        key's channels; several are for `xla` and `blocked`. The block's own keys are plain numbers, rounded as the cache
        will return them.
      value_scale: as `key_scale`; None without `value`.
      sinks: `[K * G]`, a score of every head that takes part in its softmaxes but has no value (attention sinks, Xiao
        et al. 2023, arXiv:2309.17453, learned as in gpt-oss).
      distances: `[K * G, 2 R + 1]`, what is added to a head's score by the key's position less the query's, from -R or
        less to R or more (relative positions, arXiv:1910.10683, section 2.1). For `xla` and `blocked`; never split.
      implementation: `xla` scores prefix and block in one piece. `blocked` reads only the used blocks of the cache.
        `pallas` is a kernel for TPUs or NVIDIA GPUs that does so for every row. `mosaic_gpu` is another kernel, for
        NVIDIA's Hopper, faster from 16 nodes and 16,384 slots on. None chooses when the program is lowered: `blocked` on a CPU,
        `pallas` where it can be used, otherwise `xla`. Values of another width than keys are for `xla` and `blocked`. Without
        a cache it is always `xla`, for some queries at a time. The `*_interpreted` are the kernels in an interpreter, on any
        platform: slow, for tests. All others can be differentiated. A function is called in their place, with the operands
        (`parts.Operands`, whose `visible` is set) and `scale`, `window` and `soft_cap`; it returns `[B, K, T * G, W]` float32.

    Returns:
      `[B, T, K * G, H]` in the query's type, or W in place of H. A query that sees nothing gets zeros.

    Raises:
      ValueError: on an unknown implementation, or one other than `xla` without a cache; on one scale without the other; on
        `cache_positions` without a window; on a mask of a `split` block. On lowering, if a named kernel cannot serve it.
    """
    _check(implementation, visible, cache_key, cache_positions, window, split, key_scale, value_scale, value, distances)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if isinstance(visible, Unrolled):
        return unrolled.attend(query, key, value, visible, positions=query_positions, sinks=sinks, **options)
    splits = split and distances is None and ring.splits(query, key, cache_key)
    if not splits:
        visible = own_visible(query.shape[1], key.shape[1], visible, query_positions, key_positions, causal, window)
    own = key.swapaxes(1, 2), None if value is None else value.swapaxes(1, 2)
    empty = cache_key is None or not cache_key.shape[2]
    biases = None if distances is None else distances.astype(jnp.float32).reshape(key.shape[2], -1, distances.shape[1])

    def attend(queries):
        query, visible, positions = queries
        operands = Operands(
            grouped(query, key.shape[2]), *own, cache_key, cache_value, length, visible, positions,
            key_positions if splits or distances is not None else None, unseen, key_scale, value_scale,
            None if sinks is None else of_queries(sinks, query, key.shape[2]), cache_positions, biases,
        )  # fmt: skip
        if splits:
            return ungrouped(ring.attend(operands, causal=causal, **options), query)
        return ungrouped(attend_with("xla" if empty else implementation, operands, **options), query)

    queries = query, visible, query_positions
    return chunked(attend, queries, QUERIES) if cache_key is None and not splits else attend(queries)


def _check(
    implementation, visible, cache_key, cache_positions, window, split, key_scale, value_scale, value, distances
) -> None:
    """Raises ValueError on incompatible arguments of `tree_attention`."""
    if isinstance(visible, Unrolled) and distances is not None:
        raise ValueError("an unrolled block of tree_attention has no distances: give a mask")
    named = implementation is not None and not callable(implementation)
    if named and implementation not in get_args(Implementation):
        raise ValueError(
            f"tree_attention has no implementation {implementation!r}; choose 'xla', 'blocked', 'pallas', 'mosaic_gpu' or "
            "None"
        )
    if implementation not in (None, "xla") and cache_key is None:
        raise ValueError(f"{implementation} tree attention reads a cache, and there is none: choose 'xla' or None")
    if value is not None and (key_scale is None) != (value_scale is None):
        raise ValueError("tree_attention needs the scales of keys and of values together, or neither")
    if cache_positions is not None and window is None:
        raise ValueError("cache_positions of tree_attention are of a ring, which only attention with a window can read")
    if split and visible is not None:
        raise ValueError("a split block of tree_attention is causal or full: give visible or split, not both")
    if isinstance(visible, Unrolled) and cache_key is not None:
        raise ValueError("an unrolled block of tree_attention reads no cache, and there is one")


def attend_with(
    implementation: Implementation | Callable[..., jax.Array] | None, operands: Operands, **options
) -> jax.Array:
    """Attention of grouped queries.

    Args:
      implementation: see `tree_attention`; not None without a cache.
      operands: with `visible`.
      **options: scale, window and soft_cap, see `tree_attention`.

    Returns:
      `[B, K, T * G, H]` float32.
    """
    if callable(implementation):
        return implementation(operands, **options)
    whole = over_slots(xla, jax.sharding.get_abstract_mesh(), **options)
    if implementation == "xla":
        return whole(operands)
    if implementation in INTERPRETED:
        return lowered.interpreted(*INTERPRETED[implementation], operands, **options)
    # kernels and loops of traced length have no reverse derivative; the XLA version has the same derivative
    way = jax.custom_jvp(lambda operands: lowered.attend(implementation, operands, **options))
    way.defjvp(lambda primals, tangents: jax.jvp(whole, primals, tangents))
    return way(operands)
