"""Parts that the implementations share: their operands, visibility, and the two products.

In the shape descriptions `M` denotes T * G, the queries of one kv-head; the rest is as in `api.tree_attention`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a query that sees nothing does not make NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of attention: grouped queries, the block's own keys, and the cache; or a property of each, such as
    axes.

    Attributes:
      queries: `[B, K, M, H]`.
      key: `[B, K, P + T, H]`, the uncommitted keys, in the cache's type.
      value: as `key`, or `[B, K, P + T, W]`. None: values are the keys, here and in the cache.
      cache_key: `[B, K, S, H]`, or None for no prefix.
      cache_value: as `cache_key`, with the width of `value`; None with it.
      length: `[B]` int32, visible cache slots per row.
      visible: `[B or 1, T or 1, P + T]` bool, which of the uncommitted keys a query sees; None for a block whose tokens
        a mesh splits, which is causal or full.
      query_positions: `[B, T]` int32, or None without a window.
      key_positions: `[B, P + T]` int32, with `distances`, and under a window for a block whose tokens a mesh splits; otherwise
        None.
      unseen: `[B, S]` bool, holes in the cache, or None.
      key_scale: `[B, K G, S]` for a quantised cache, or None; a key's channels have G parts.
      value_scale: as `key_scale`.
      cache_positions: `[B, S]` int32 for a ring; None: slot s holds position s.
      distances: `[K, G, 2 R + 1]` float32, what is added to a score by the key's position less the query's, from -R to R; or
        None.
      sinks: `[K, M]` float32, a score without a value that every query meets once, or None.
    """

    queries: Any
    key: Any
    value: Any
    cache_key: Any
    cache_value: Any
    length: Any
    visible: Any = None
    query_positions: Any = None
    key_positions: Any = None
    unseen: Any = None
    key_scale: Any = None
    value_scale: Any = None
    sinks: Any = None
    cache_positions: Any = None
    distances: Any = None

    @property
    def values(self) -> Any:
        """The uncommitted values."""
        return self.key if self.value is None else self.value

    @property
    def cache_values(self) -> tuple[Any, Any]:
        """The cached values and their scales."""
        if self.value is None:
            return self.cache_key, self.key_scale
        return self.cache_value, self.value_scale

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result, `[B, K, M, W]`."""
        return (*self.queries.shape[:3], self.values.shape[3])

    @property
    def other_values(self) -> str | None:
        """The reason why a kernel for values of the keys' width cannot take these, or None."""
        width, own = self.key.shape[3], self.values.shape[3]
        return None if width == own else f"its values are as wide as its keys, not {own} and {width}"

    @property
    def no_values(self) -> str | None:
        """The reason why a kernel that reads keys and values apart cannot take these, or None."""
        return "it reads values of their own, and these are the keys" if self.value is None else None

    @property
    def by_distance(self) -> str | None:
        """The reason why a kernel whose scores do not depend on distances cannot take these, or None."""
        return None if self.distances is None else "its scores do not depend on the distances of keys"

    def added(self, positions: jax.Array) -> jax.Array | None:
        """What is added to the scores of keys at `positions` `[B or 1, S]`: `[B, K, M, S]` float32; None: nothing."""
        if self.distances is None:
            return None
        heads, group, size = self.distances.shape
        reach = size // 2
        away = jnp.clip(positions[:, None] - self.query_positions[:, :, None], -reach, reach) + reach
        found = jnp.take(self.distances.reshape(heads * group, size), away, axis=1, mode="clip")  # [N, B, T, S]
        found = found.reshape(heads, group, *away.shape).transpose(2, 0, 3, 1, 4)
        return found.reshape(away.shape[0], heads, -1, away.shape[2])

    @property
    def several_scales(self) -> str | None:
        """The reason why a kernel for one scale per slot and head cannot take these, or None."""
        if self.key_scale is None or self.key_scale.shape[1] == self.key.shape[1]:
            return None
        return "its cache has one scale per slot and head, not several"


class Found(NamedTuple):
    """The result of queries over a part of the keys that they see; softmaxes over several parts can be merged.

    Attributes:
      peak: `[B, K, M, 1]` float32, the highest score; MASKED where nothing was seen.
      total: `[B, K, M, 1]` float32, the sum of the weights `exp(score - peak)`.
      sums: `[B, K, M, W]` float32, the sum of the values times their weights.
    """

    peak: jax.Array
    total: jax.Array
    sums: jax.Array


def nothing(shape):
    """The empty result of this shape."""
    return Found(jnp.full((*shape[:-1], 1), MASKED), jnp.zeros((*shape[:-1], 1)), jnp.zeros(shape))


def finished(found, sinks=None):
    """The attention `[B, K, M, H]` float32, with `sinks` `[K, M]` if given; zeros for a query that saw nothing."""
    if sinks is None:
        return found.sums / jnp.maximum(found.total, 1e-30)
    sinks = sinks[None, :, :, None]
    peak = jax.lax.stop_gradient(jnp.maximum(found.peak, sinks))
    worth = jnp.exp(jax.lax.stop_gradient(found.peak) - peak)
    return found.sums * worth / (found.total * worth + jnp.exp(sinks - peak))


def merged(found, axis):
    """The merged results of the devices of a mesh axis, inside `shard_map`."""
    peak = jax.lax.pmax(jax.lax.stop_gradient(found.peak), axis)
    worth = jnp.exp(found.peak - peak)
    return Found(peak, *jax.lax.psum((found.total * worth, found.sums * worth), axis))


def grouped(query, kv_heads):
    """Queries as `[B, K, M, H]`: rearranges the small operand, so that the cache is multiplied as it is."""
    batch, block, heads, width = query.shape
    query = query.reshape(batch, block, kv_heads, heads // kv_heads, width).transpose(0, 2, 1, 3, 4)
    return query.reshape(batch, kv_heads, -1, width)


def of_queries(sinks, query, kv_heads):
    """Numbers per query head `[K * G]` as `[K, M]` float32, for every query of a kv-head."""
    return jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (1, query.shape[1]))


def ungrouped(out, query):
    """A result `[B, K, M, W]` in the queries' order and type."""
    batch, block, heads, _ = query.shape
    width = out.shape[3]
    out = out.reshape(batch, out.shape[1], block, -1, width).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, block, heads, width).astype(query.dtype)


def own_visible(block, keys, visible, query_positions, key_positions, causal, window):
    """Which of the block's `keys` uncommitted keys a query sees, `[B or 1, T, P + T]` bool."""
    if visible is None:
        visible = jnp.tril(jnp.ones((block, keys), bool), keys - block) if causal else jnp.ones((block, keys), bool)
        visible = visible[None]
    if window is not None:
        visible = visible & (query_positions[:, :, None] - key_positions[:, None, :] < window)
    return visible


def prefix_visible(slots, length, query_positions, unseen, window, positions=None):
    """Which cache `slots` `[1, S]` a query sees, `[B, T or 1, S]` bool; none of those in `unseen` `[B, S]`.

    The slots hold `positions` `[B, S]`; without these, slot s holds position s."""
    seen = (slots < length[:, None])[:, None, :]
    seen = seen if unseen is None else seen & ~unseen[:, None, :]
    held = slots if positions is None else positions
    return seen if window is None else seen & (query_positions[:, :, None] - held[:, None] < window)


def capped(scores, soft_cap):
    """Scores kept within `soft_cap` of zero by a tanh, or unchanged (Gemma 2, arXiv:2408.00118, section 2)."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def scores(query, key, visible, scale, soft_cap, key_scale=None, added=None):
    """Queries `[B, K, M, H]` times keys `[B, K, S, H]`, MASKED where not `visible` `[B or 1, T or 1, S]`: `[B, K, M, S]`.

    With a `key_scale` `[B, K G, S]`, the keys are quantised, and it is the factor of each of their G parts. `added`
    `[B or 1, K, M, S]` is added at the end.
    """
    key, key_scale = _of_heads(key, key_scale, query.dtype)
    product = jax.lax.dot_general(query, key, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    product = product if key_scale is None else product * key_scale[:, :, None]
    scored = capped(product * scale, soft_cap)
    scored = scored if added is None else scored + added
    # a view by query and head: the mask of a query repeated for its heads would be found by a division for each score
    batch, heads, rows, slots = scored.shape
    of_query = scored.reshape(batch, heads, visible.shape[1], rows // visible.shape[1], slots)
    return jnp.where(visible[:, None, :, None], of_query, MASKED).reshape(scored.shape)


def _of_heads(x, scale, dtype):
    """Quantised numbers `[B, K, S, H]` with scales `[B, K G, S]`, as numbers of `dtype` with at most one scale, `[B, K, S]`."""
    if scale is None:
        return x, None
    if scale.shape[1] == x.shape[1]:
        return x.astype(dtype), scale
    by_parts = x.reshape(*x.shape[:3], scale.shape[1] // x.shape[1], -1)
    factors = scale.reshape(*x.shape[:2], -1, x.shape[2]).swapaxes(2, 3)
    return (by_parts.astype(jnp.float32) * factors[..., None]).reshape(x.shape).astype(dtype), None


def mix(weights, value, value_scale=None, dtype=None):
    """Weights `[B, K, M, S]` times values `[B, K, S, H]`: `[B, K, M, H]`, in the values' type, or `dtype` if they are
    quantised."""
    value, value_scale = _of_heads(value, value_scale, dtype)
    weights = weights if value_scale is None else weights * value_scale[:, :, None]
    weights = weights.astype(value.dtype)
    return jax.lax.dot_general(weights, value, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def running(carry, scored):
    """The running softmax's next peak and total, the weights of new scores, and the factor of the old sums.

    Args:
      carry: peak and total so far, `[..., M, 1]` float32; MASKED and 0 where nothing was seen.
      scored: `[..., M, S]`.

    Returns:
      `(peak, total), weights [..., M, S], keep [..., M, 1]`.
    """
    peak, total = carry
    new = jnp.maximum(peak, jnp.max(scored, axis=-1, keepdims=True))
    weights = jnp.where(scored > MASKED / 2, jnp.exp(scored - new), 0.0)
    keep = jnp.exp(peak - new)
    return (new, total * keep + jnp.sum(weights, axis=-1, keepdims=True)), weights, keep


def packed(visible):
    """A mask `[..., n]` as int32 words `[..., ceil(n / 32)]`: bit i of word w is key 32 w + i."""
    pad = -visible.shape[-1] % 32
    bits = jnp.pad(visible, [(0, 0)] * (visible.ndim - 1) + [(0, pad)]).reshape(*visible.shape[:-1], -1, 32)
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * (bits.ndim - 1) + (32,))
    words = jnp.sum(bits.astype(jnp.uint32) << shifts, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def unpacked(words):
    """Words `[M, W]` as a mask `[M, 32 W]`, by selects along the lanes, since kernels have no gather."""
    rows, count = words.shape
    key = jax.lax.broadcasted_iota(jnp.int32, (rows, 32 * count), 1)
    chosen = jnp.broadcast_to(words[:, :1], key.shape)
    for w in range(1, count):
        chosen = jnp.where(key >= 32 * w, words[:, w : w + 1], chosen)
    return ((chosen >> (key & 31)) & 1) == 1


def query_facts(visible, query_positions, batch, rows):
    """A kernel's data on every query of a kv-head, `[B, M, W]` or, with positions, `[B, M, W + 1]` int32.

    The words of `visible` `[B or 1, T or 1, P + T]` come first, then the position.
    """
    facts = packed(visible)
    if query_positions is not None:
        facts = jnp.broadcast_to(facts, (*query_positions.shape, facts.shape[2]))
        facts = jnp.concatenate([facts, query_positions[:, :, None]], axis=-1)
    facts = jnp.repeat(facts, rows // facts.shape[1], axis=1)
    return jnp.broadcast_to(facts, (batch, *facts.shape[1:]))


def product(a, b, axes):
    """For kernels: the product over one axis of each, in float32; the narrower operand is widened."""
    wide = jnp.promote_types(a.dtype, b.dtype)
    precision = jax.lax.Precision.HIGHEST if wide == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a.astype(wide), b.astype(wide), (((axes[0],), (axes[1],)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
