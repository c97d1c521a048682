"""A Markov chain under the LM contract, whose sequence probabilities are known exactly; the oracle for tests.

A query's logits depend on its own token and, at order 2, on the visible token one position before. If several visible
slots claim that position, their logits are mixed, so a mask that shows too much changes the output. Positions before 0,
and positions that a query cannot see, hold token 0.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import BaseLM, Block, Draw, Output, Partial, Wants, inputs

Array = jax.Array

NEVER = -1e9  # the logit of an impossible token: finite, but its probability is exactly 0 in float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TabularCache:
    """Attributes: `tokens`: `[B, S]` int32; slot s of a row holds the token of position s."""

    tokens: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TabularDelta:
    """Attributes: `tokens` and `positions` of a block, `[B, T]` int32 each."""

    tokens: Array
    positions: Array


@dataclasses.dataclass(frozen=True)
class TabularLM(BaseLM):
    """A Markov LM of order 1 or 2. Params: `{"table": logits}`, `[V, V]` or `[V, V, V]` float32, the next token last.

    Features `[B, T, E]` have width `E = order * V`: the token one-hot, then (order 2) the one before it, as a mean of
    one-hots over the slots that claim its position.

    Raises:
      ValueError: if `order` is neither 1 nor 2, or the vocabulary is empty.
    """

    vocab_size: int
    order: int = 1

    num_layers = 1
    reads_mixtures = True

    def __post_init__(self):
        if self.order not in (1, 2) or self.vocab_size < 1:
            raise ValueError(f"TabularLM needs order 1 or 2 and a vocabulary, not {self.order} and {self.vocab_size}")

    def init(self, key: Array, concentration: float = 0.7, zeros: float = 0.0) -> Any:
        """See `random`."""
        return random(key, self.vocab_size, self.order, concentration, zeros)

    def abstract(self) -> Any:
        """The params pytree, each leaf a `jax.ShapeDtypeStruct`."""
        return {"table": jax.ShapeDtypeStruct((self.vocab_size,) * (self.order + 1), jnp.float32)}

    def __call__(
        self,
        params: Any,
        block: Block,
        cache: TabularCache | None,
        *,
        wants: Wants,
        draw: Draw | None = None,
        past: TabularDelta | None = None,
        partial: Partial | None = None,
    ) -> Output:
        if partial is None:
            h, lo = inputs(self, params, block), 0
        else:
            h, lo = partial.h, partial.lo
        h, delta = self.layers(params, h, lo, 1, block, cache, past)
        logits = topk = drawn = None
        if wants.head:
            logits = self.unembed(params, self.norm(params, h))
            topk = jax.lax.top_k(logits, wants.topk) if wants.topk else None
            drawn = draw(logits) if wants.draw and draw is not None else None
        return Output(
            delta=delta,
            logits=logits if wants.logits else None,
            topk=topk,
            draw=drawn,
            hidden=dict.fromkeys(wants.hidden, h) if wants.hidden else None,
            final=self.norm(params, h) if wants.final else None,
        )

    def embed(self, params: Any, tokens: Array) -> Array:
        """Features `[B, T, E]` of ids `[B, T]`, with the previous token's part empty. Ids outside the vocabulary are
        token 0."""
        own = jax.nn.one_hot(self._known(tokens), self.vocab_size)
        return jnp.concatenate([own, *[jnp.zeros_like(own)] * (self.order - 1)], axis=-1)

    def layers(
        self,
        params: Any,
        h: Array,
        lo: int,
        hi: int,
        block: Block,
        cache: TabularCache | None,
        past: TabularDelta | None = None,
        skip: Array | None = None,
        below: TabularDelta | None = None,
    ) -> tuple[Array, TabularDelta]:
        """Runs the only layer, which fills in the previous token's part; with its attention skipped, that part is
        unchanged."""
        delta = TabularDelta(self._known(block.tokens), block.positions)
        if self.order == 1 or lo >= hi:
            return h, delta
        if skip is not None:
            attend = lambda h: self.layers(params, h, lo, hi, block, cache, past)[0]
            return jax.lax.cond(skip[0, 0], lambda h: h, attend, h), delta
        tokens, positions = delta.tokens, delta.positions
        if past is not None:
            tokens = jnp.concatenate([past.tokens, tokens], axis=1)
            positions = jnp.concatenate([past.positions, positions], axis=1)
        width, keys = block.tokens.shape[1], tokens.shape[1]
        visible = block.visible
        if visible is None:
            every = jnp.ones((1, width, keys), bool)
            visible = jnp.tril(every, keys - width) if block.causal else every
        before = block.positions[:, :, None] - 1
        found = visible & (positions[:, None, :] == before)
        if cache is not None:
            slots = jnp.arange(cache.tokens.shape[1])[None, None, :]
            in_cache = (slots < block.length[:, None, None]) & (slots == before)
            found = jnp.concatenate([in_cache, found], axis=-1)
            tokens = jnp.concatenate([cache.tokens, tokens], axis=1)
        one_hot = jax.nn.one_hot(tokens, self.vocab_size)
        total = jnp.einsum("bts,bsv->btv", found.astype(h.dtype), one_hot, precision="highest")
        count = found.sum(axis=-1, keepdims=True)
        nothing = jax.nn.one_hot(jnp.zeros(block.tokens.shape, jnp.int32), self.vocab_size)
        previous = jnp.where(count > 0, total / jnp.maximum(count, 1), nothing)
        return jnp.concatenate([h[..., : self.vocab_size], previous], axis=-1), delta

    def join(self, below: TabularDelta, above: TabularDelta) -> TabularDelta:
        """Either delta: each holds the block's tokens, whatever the layers."""
        return below

    def norm(self, params: Any, h: Array) -> Array:
        """The identity."""
        return h

    def unembed(self, params: Any, h: Array) -> Array:
        """Logits `[B, T, V]` in float32: the rows of the table that features `[B, T, E]` select."""
        own = h[..., : self.vocab_size].astype(jnp.float32)
        if self.order == 1:
            return jnp.einsum("bti,iv->btv", own, params["table"], precision="highest")
        previous = h[..., self.vocab_size :].astype(jnp.float32)
        return jnp.einsum("btj,bti,jiv->btv", previous, own, params["table"], precision="highest")

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> TabularCache:
        """An empty cache. It holds ids, so `dtype` changes nothing."""
        return TabularCache(jnp.zeros((batch, capacity), jnp.int32))

    def commit(
        self, cache: TabularCache, delta: TabularDelta, src: Array | None, dst: Array, counts: Array | None = None
    ) -> TabularCache:
        """See `specjax.lm.LM.commit`."""

        def row(slots, new, src, dst):
            if src is not None:
                new = new.at[src].get(mode="clip")
            if dst.ndim == 0:
                return jax.lax.dynamic_update_slice(slots, new, (dst,))
            return slots.at[dst].set(new, mode="drop")

        in_axes = (0, 0, None if src is None else 0, 0)
        return TabularCache(jax.vmap(row, in_axes=in_axes)(cache.tokens, delta.tokens, src, dst))

    def axes(self, params: Any) -> Any:
        return {"table": (None,) * self.order + ("vocab",)}

    def cache_axes(self, cache: TabularCache) -> TabularCache:
        return jax.tree.map(lambda _: ("batch", None), cache)

    def next_log_probs(self, params: Any, context: Any) -> np.ndarray:
        """Log-probabilities `[..., V]` (numpy float64) of the token after `context` `[..., n]`; n may be 0."""
        context = np.asarray(context, np.int64)
        padding = np.zeros((*context.shape[:-1], self.order), np.int64)
        last = np.concatenate([padding, context], axis=-1)[..., -self.order :]
        logits = np.asarray(params["table"], np.float64)[tuple(np.moveaxis(last, -1, 0))]
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

    def sequence_log_prob(self, params: Any, tokens: Any, prefix: Any = ()) -> np.ndarray:
        """The log-probability `[...]` (numpy float64) of `tokens` `[..., L]` after `prefix` `[P]` or `[..., P]`."""
        tokens = np.asarray(tokens, np.int64)
        prefix = np.asarray(prefix, np.int64)
        prefix = np.broadcast_to(prefix, (*tokens.shape[:-1], prefix.shape[-1]))
        text = np.concatenate([prefix, tokens], axis=-1)
        total = np.zeros(tokens.shape[:-1])
        for i in range(prefix.shape[-1], text.shape[-1]):
            log_probs = self.next_log_probs(params, text[..., :i])
            total += np.take_along_axis(log_probs, text[..., i : i + 1], axis=-1)[..., 0]
        return total

    def _known(self, tokens: Array) -> Array:
        return jnp.where((tokens >= 0) & (tokens < self.vocab_size), tokens, 0).astype(jnp.int32)


def random(key: Array, vocab_size: int, order: int = 1, concentration: float = 0.7, zeros: float = 0.0) -> Any:
    """Params whose rows are draws from a symmetric Dirichlet distribution.

    Args:
      key: a `jax.random.key`.
      vocab_size: V.
      order: 1 or 2.
      concentration: small values make peaked rows.
      zeros: the share of entries that become impossible (logit `NEVER`); a row keeps its likeliest token.
    """
    weights_key, zeros_key = jax.random.split(key)
    shape = (vocab_size,) * (order + 1)
    table = jax.nn.log_softmax(jax.random.loggamma(weights_key, concentration, shape), axis=-1)
    if zeros > 0:
        never = jax.random.bernoulli(zeros_key, zeros, shape) & (table < table.max(axis=-1, keepdims=True))
        table = jnp.where(never, NEVER, table)
    return {"table": table}
