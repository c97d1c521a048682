"""Cascade pruning of tokens and heads (SpAtten, arXiv:2012.09852): what a layer drops is dropped by all later layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.models.caches.base import Old, kept_layers
from specjax.models.caches.spatten_reads import Reads, cascade, spoken
from specjax.pretty import Pretty

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alive(Pretty):
    """The tokens that a layer keeps, for all of its heads.

    Attributes:
      key: `[B, K, C, H]`.
      value: as `key`.
      positions: `[B, C]` int32; -1 for an empty slot.
      score: `[B, C]` float32, the attention received from all queries, summed over heads, in this and all lower layers.
        A token that leaves the exact ones after the prompt begins with the last chunk's.
      spoken: `[B, K, 1]` float32, what heads gave to queries in all lower layers; None if no heads are pruned.
      live: `[B, K, 1]` bool, the heads that are not pruned; None as `spoken`.
    """

    key: Array
    value: Array
    positions: Array
    score: Array
    spoken: Array | None = None
    live: Array | None = None


@dataclasses.dataclass(frozen=True)
class SpAtten(Old):
    """Keeps the most important older tokens, fewer in later layers.

    The first layer keeps `important` tokens, the last one `last`, and layers between in proportion. A layer keeps a
    subset of the tokens of the layer below. A token's importance is the attention that it has received so far, summed
    over heads and over layers up to this one. The first `start` tokens are always kept.

    The other parts of the method are off unless they are asked for:

    - Heads, by kv-heads with all of their queries: the last layer has a share `heads` of them, and layers between the
      first and the last in proportion. A layer has a subset of those of the layer below. A head's importance is the sum
      of the absolute values of what it gave to queries so far, summed over lower layers.
    - Values and keys in few bits: see `specjax.models.caches.spatten_reads.Reads`.

    These parts save reads on the paper's accelerator. Here they are masks and roundings of whole keys and values, which
    save neither memory nor time; `reads` counts what would be read. The paper's values in eight bits and queries in
    sixteen are left out.

    Attributes:
      important: C of the first layer.
      last: C of the last layer.
      start: the number of tokens at the beginning of a text that are always kept.
      heads: the share of heads in the last layer; 1: all.
      values: the share of values that a query reads, those of its largest weights; 1: all.
      bits: the high bits of keys, which are read first; 0: keys are exact.
      more: their low bits, which a query reads if its largest weight is below `threshold`.
      threshold: see `more`.
    """

    about = About(
        "spatten",
        "keeps what queries look at, fewer tokens the higher a layer is",
        "arXiv:2012.09852",
        "lossy",
    )

    important: int = 256
    last: int = 128
    start: int = 4
    heads: float = 1.0
    values: float = 1.0
    bits: int = 0
    more: int = 4
    threshold: float = 0.05

    def __post_init__(self):
        if not 1 <= self.chunk <= self.last <= self.important or not 0 <= self.start <= self.last or self.recent < 0:
            raise ValueError(
                f"spatten needs 1 <= chunk <= last <= important, start in [0, last] and recent >= 0, got {self}"
            )
        bits = self.bits == 0 or (self.bits >= 2 and self.more >= 0 and self.bits + self.more <= 16)
        if not (0 < self.heads <= 1 and 0 < self.values <= 1 and bits and 0 <= self.threshold):
            raise ValueError(
                "spatten needs heads and values in (0, 1], bits of 0 or from 2 on, more >= 0, at most 16 of both together, and "
                f"threshold >= 0, got {self}"
            )

    @property
    def asks(self):
        return self.chunk

    def check(self, config):
        counts = sorted({config.attention(i).num_key_value_heads for i in kept_layers(config)})
        if self.heads < 1 and len(counts) > 1:
            raise ValueError(
                f"spatten:heads prunes the same heads in all layers, and these have {counts}: leave heads out"
            )

    def init(self, config, layer, batch, capacity, dtype):
        kind = config.attention(layer)
        size, _ = self.kept(config, layer)
        shape = (batch, kind.num_key_value_heads, 1)
        spoken, live = (jnp.zeros(shape), jnp.ones(shape, bool)) if self.heads < 1 else (None, None)
        zeros = lambda: jnp.zeros((batch, kind.num_key_value_heads, size, kind.head_dim), dtype)
        empty = jnp.full((batch, size), -1, jnp.int32)
        return Alive(zeros(), zeros(), empty, jnp.zeros((batch, size), jnp.float32), spoken, live)

    def kept(self, config: Any, layer: int) -> tuple[int, int]:
        """How many older tokens and how many kv-heads a layer keeps."""
        layers = kept_layers(config)
        share = layers.index(layer) / max(len(layers) - 1, 1)
        heads = config.attention(layer).num_key_value_heads
        return round(self.important + (self.last - self.important) * share), _heads_kept(heads, self.heads, share)

    def read(self, body, folded):
        return body.key, body.value, body.positions >= 0

    def attend(self, body):
        if self.heads == self.values == 1 and not self.bits:
            return None
        return Reads(body.live, self.values, self.bits, self.more, self.threshold)

    def reads(self, config: Any, tokens: int, low: float = 1.0, width: int = 16) -> tuple[int, int]:
        """The bits of keys and values that a step would read of a text, of a whole cache and of this one.

        It counts for a machine that reads only what the method asks for, in the layers whose older tokens are kept.
        Both are stored in `width` bits, but keys with `bits` are not. `low` is the share of queries that read the low
        bits.

        Args:
          config: a `ModelConfig`.
          tokens: how many the text has.
          low: from 0 to 1.
          width: of values, and of keys without `bits`.
        """
        folded = max(tokens - self.recent, 0) // self.chunk * self.chunk
        whole, pruned = 0, 0.0
        for layer in kept_layers(config):
            kind, (size, heads) = config.attention(layer), self.kept(config, layer)
            seen = tokens - folded + min(size, folded)
            key = self.bits + self.more * low if self.bits else width
            whole += tokens * kind.num_key_value_heads * kind.head_dim * 2 * width
            pruned += heads * kind.head_dim * (seen * key + int(self.values * seen + 1e-4) * width)
        return whole, round(pruned)

    def begin(self, bodies, prompts, folded, lengths):
        kept, alive, brought = [], None, 0.0
        for body, prompt in zip(bodies, prompts, strict=True):
            size, slots = body.positions.shape[1], prompt.key.shape[2]
            at = jnp.arange(slots)[None]
            # a layer drops what the layer below has dropped, and adds up the attention that the others received there
            alive = at < folded[:, None] if alive is None else alive
            assert prompt.every is not None
            score = jnp.where(alive, prompt.every.sum(axis=1) + brought, 0.0)
            worth = jnp.where(alive, jnp.where(at < self.start, jnp.inf, score), -jnp.inf)
            places = jnp.sort(jax.lax.top_k(worth, min(size, slots))[1], axis=1)
            take = lambda x, places=places: jnp.take_along_axis(x, places, axis=1)
            pad = lambda x, fill, axis, more=size - places.shape[1]: jnp.pad(
                x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=fill
            )
            here = take(alive)
            keys = (jnp.take_along_axis(x, places[:, None, :, None], axis=2) for x in (prompt.key, prompt.value))
            key, value = (pad(x, 0, 2) for x in keys)
            kept.append(Alive(key, value, pad(jnp.where(here, places, -1), -1, 1), pad(take(score), 0, 1)))
            alive = jax.vmap(lambda places, here, n=slots: jnp.zeros((n,), bool).at[places].set(here))(places, here)
            brought = score
        if self.heads == 1:
            return tuple(kept)
        spoke = []
        for prompt in prompts:
            at = jnp.arange(prompt.key.shape[2])[None, None]
            seen, fresh = at <= prompt.asking[:, :, None], prompt.asking >= 0
            spoke.append(spoken(prompt.query, prompt.key, prompt.value, seen, fresh))
        return self._with_heads(kept, bodies, spoke)

    def fold(self, bodies, layers, folded):
        kept, below, brought = [], None, None
        for body, layer in zip(bodies, layers, strict=True):
            weights = layer.attention(body.key, body.positions >= 0)
            positions = jnp.concatenate([body.positions, layer.positions], axis=1)
            fresh = layer.given(weights).sum(axis=1)
            # a token's attention in this chunk, including the layers below, all of which keep it
            same = None if below is None else _same(positions, below.positions)
            fresh = fresh if same is None else fresh + jnp.einsum("bij,bj->bi", same, brought)
            score = jnp.pad(body.score, ((0, 0), (0, self.chunk))) + fresh
            alive = positions >= 0 if same is None else (positions >= 0) & (same.sum(axis=2) > 0)
            worth = jnp.where(alive, jnp.where(positions < self.start, jnp.inf, score), -jnp.inf)
            worth, at = jax.lax.top_k(worth, body.positions.shape[1])
            order = jnp.argsort(at, axis=1)  # in the original order
            worth, at = jnp.take_along_axis(worth, order, axis=1), jnp.take_along_axis(at, order, axis=1)
            take = lambda x, at=at: jnp.take_along_axis(x, at, axis=1)
            every = [jnp.concatenate(pair, axis=2) for pair in ((body.key, layer.key), (body.value, layer.value))]
            key, value = (jnp.take_along_axis(x, at[:, None, :, None], axis=2) for x in every)
            held = jnp.where(worth == -jnp.inf, -1, take(positions))
            below, brought = Alive(key, value, held, take(score)), take(fresh)
            kept.append(below)
        if self.heads == 1:
            return tuple(kept)
        spoke = []
        for body, layer in zip(bodies, layers, strict=True):
            held = jnp.broadcast_to((body.positions >= 0)[:, None], (*layer.seen.shape[:2], body.positions.shape[1]))
            seen = jnp.concatenate([held, layer.seen], axis=2)
            key, value = (
                jnp.concatenate(pair, axis=2) for pair in ((body.key, layer.ring), (body.value, layer.ring_value))
            )
            spoke.append(spoken(layer.query, key, value, seen, layer.fresh))
        return self._with_heads(kept, bodies, spoke)

    def _with_heads(self, kept, bodies, spoke) -> tuple[Alive, ...]:
        """The bodies with the heads that live, after heads gave `spoke` to new queries, by layer."""
        shares = [i / max(len(bodies) - 1, 1) for i in range(len(bodies))]
        counts = [_heads_kept(new.shape[1], self.heads, share) for new, share in zip(spoke, shares, strict=True)]
        found = cascade(counts, [body.spoken[..., 0] for body in bodies], spoke)
        return tuple(
            dataclasses.replace(body, spoken=total[..., None], live=live[..., None])
            for body, (total, live) in zip(kept, found, strict=True)
        )


def _heads_kept(heads: int, last: float, share: float) -> int:
    """How many of `heads` are kept by a layer `share` of the way from the first to the last, which keeps `last` of them."""
    return max(round(heads * (1 + (last - 1) * share)), 1)


def _same(a: Array, b: Array) -> Any:
    """Whether positions `[B, i]` and `[B, j]` are equal, `[B, i, j]` float32; empty slots equal nothing."""
    return ((a[:, :, None] == b[:, None, :]) & (a >= 0)[:, :, None]).astype(jnp.float32)
