"""What a query of SpAtten reads of a layer (arXiv:2012.09852): keys in few bits first, the values of large weights, live
heads."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import MASKED, Operands, mix, prefix_visible, scores
from specjax.pretty import Pretty

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reads(Pretty):
    """An implementation of `tree_attention`.

    Keys are rounded to `bits + more` bits. A query first sees only the high `bits` of them. Where its largest weight is
    below `threshold`, its weights are spread over many keys, so that errors matter: it reads the low bits too. Of the
    values, only those with the largest weights are read, and the other weights count as 0.

    All of it is computed here from whole keys and values, so it saves neither memory nor time.

    Attributes:
      live: `[B, K, 1]` bool, the kv-heads that are not pruned; the others give zeros. None: all.
      values: the share of the seen values that are read.
      bits: the high bits of keys; 0: keys are exact.
      more: their low bits.
      threshold: see above.
    """

    live: Array | None = None
    values: float = dataclasses.field(default=1.0, metadata={"static": True})
    bits: int = dataclasses.field(default=0, metadata={"static": True})
    more: int = dataclasses.field(default=4, metadata={"static": True})
    threshold: float = dataclasses.field(default=0.05, metadata={"static": True})

    def __call__(self, operands: Operands, *, scale, window, soft_cap) -> Array:
        """The attention `[B, K, M, H]` float32 of grouped queries.

        Raises:
          ValueError: if scores depend on distances.
        """
        o = operands
        if o.distances is not None:
            raise ValueError("spatten reads keys whatever their distance, and this model adds numbers for distances")
        slots = o.cache_key.shape[2]
        seen = prefix_visible(jnp.arange(slots)[None], o.length, o.query_positions, o.unseen, window, o.cache_positions)

        def weighed(kept):
            before = scores(o.queries, kept(o.cache_key), seen, scale, soft_cap)
            own = scores(o.queries, kept(o.key), o.visible, scale, soft_cap)
            scored = jnp.concatenate([before, own], axis=-1)
            return shares(scored, o.sinks), (scored > MASKED / 2).sum(axis=-1, keepdims=True)

        if self.bits:
            weights, count = weighed(lambda x: in_bits(x, self.bits, self.more, high=True))
            whole, _ = weighed(lambda x: in_bits(x, self.bits, self.more))
            weights = jnp.where(flat(weights, self.threshold), whole, weights)
        else:
            weights, count = weighed(lambda x: x)
        weights = weights if self.values == 1 else largest(weights, self.values, count)
        out = mix(weights[..., :slots], o.cache_value) + mix(weights[..., slots:], o.values)
        return out if self.live is None else jnp.where(self.live[..., None], out, 0.0)


def shares(scored: Array, sinks: Array | None) -> Array:
    """The weights of scores `[B, K, M, S]`; 0 for what is not seen. `sinks` `[K, M]` take part and give nothing."""
    peak = scored.max(axis=-1, keepdims=True)
    peak = peak if sinks is None else jnp.maximum(peak, sinks[None, :, :, None])
    weights = jnp.where(scored > MASKED / 2, jnp.exp(scored - peak), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks[None, :, :, None] - peak)
    return weights / jnp.maximum(total, 1e-30)


def in_bits(x: Array, bits: int, more: int, high: bool = False) -> Array:
    """Vectors `[..., H]` in `bits + more` bits, with a scale for each; `high`: without the `more` low ones.

    >>> in_bits(jnp.asarray([127.0, -3.0, 100.0]), 4, 4).tolist()
    [127.0, -3.0, 100.0]
    >>> in_bits(jnp.asarray([127.0, -3.0, 100.0]), 4, 4, high=True).tolist()
    [112.0, -16.0, 96.0]
    """
    top = 2 ** (bits + more - 1) - 1
    step = jnp.maximum(jnp.abs(x).max(axis=-1, keepdims=True).astype(jnp.float32) / top, 1e-30)
    codes = jnp.round(x.astype(jnp.float32) / step).astype(jnp.int32)
    return ((codes >> more << more if high else codes) * step).astype(x.dtype)


def flat(weights: Array, threshold: float) -> Array:
    """Whether queries need the low bits too: their largest weight `[..., S]` is below the threshold, `[..., 1]`."""
    return weights.max(axis=-1, keepdims=True) < threshold


def largest(weights: Array, share: float, seen: Array) -> Array:
    """Weights `[..., S]` with only the largest of each query kept: a share of the `seen` `[..., 1]` keys, rounded down, at
    least one.

    >>> largest(jnp.asarray([0.1, 0.5, 0.0, 0.25, 0.15]), 0.5, jnp.asarray([4])).tolist()
    [0.0, 0.5, 0.0, 0.25, 0.0]
    """
    count = jnp.maximum(jnp.floor(share * seen + 1e-4), 1)
    ranks = jnp.argsort(jnp.argsort(-weights, axis=-1), axis=-1)
    return jnp.where(ranks < count, weights, 0.0)


def spoken(query: Array, key: Array, value: Array, seen: Array, fresh: Array) -> Array:
    """The importance `[B, K]` of kv-heads: the sum of the absolute values of what they give to queries.

    Args:
      query: `[B, K, W, G, H]`, scaled.
      key: `[B, K, S, H]`.
      value: as `key`.
      seen: `[B, W, S]` bool, the keys that a query sees.
      fresh: `[B, W]` bool, the queries that count.
    """
    scored = jnp.einsum("bkwgh,bksh->bkwgs", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen[:, None, :, None], scored, -1e30), axis=-1)
    given = jnp.einsum("bkwgs,bksh->bkwgh", weights, value, preferred_element_type=jnp.float32)
    return jnp.where(fresh[:, None], jnp.abs(given).sum(axis=(3, 4)), 0.0).sum(axis=2)


def cascade(counts: list[int], before: list[Array], spoke: list[Array]) -> list[tuple[Array, Array]]:
    """Which kv-heads live in each layer, nested: a layer keeps the most important of those that the layer below has.

    Args:
      counts: how many live, by layer.
      before: `[B, K]` by layer, what heads gave in lower layers to earlier queries.
      spoke: `[B, K]` by layer, what heads give in this layer to new queries.

    Returns:
      By layer, `before` with the new queries, and `[B, K]` bool.
    """
    found, live, brought = [], jnp.ones(spoke[0].shape, bool), jnp.zeros_like(spoke[0])
    for count, old, new in zip(counts, before, spoke, strict=True):
        total = old + brought
        worth = jnp.where(live, total, -1.0)
        live = live & (jnp.argsort(jnp.argsort(-worth, axis=1), axis=1) < count)
        found.append((total, live))
        brought = brought + jnp.where(live, new, 0.0)
    return found
