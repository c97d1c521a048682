"""The n-grams that a draft model of another vocabulary may write for one token of the target, learnt from a row's text.

How a token of the target is spelt is known beforehand (`specjax.draft.vocabularies.tables`). What is learnt is which of
these tokens a text uses, so a row's cache holds tokens of the target alone.

Shapes: `B` rows, `S` slots, `K` n-grams that are weighed, `W` draft tokens of the longest, `V` tokens of the target, `V'`
of the draft model.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.vocabularies.spelling import Spelt

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Known(Spelt):
    """The state of a draft model with a text of its own and a cache of n-grams.

    Attributes:
      grams: `[B, S]` int32, tokens of the target that the row's text has and that several draft tokens spell; -1 in
        empty slots. A token's slot is its id modulo S, and the newest one keeps it.
      longest: static, W.
    """

    grams: Any
    longest: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, text: Spelt, grams: Any, longest: int) -> "Known":
        """A text with a cache."""
        own = {field.name: getattr(text, field.name) for field in dataclasses.fields(Spelt)}
        return cls(**own, grams=grams, longest=longest)

    def axes(self, lm):
        return Known.of(super().axes(lm), ("batch", None), self.longest)

    def spelling(self, tables, tokens, real):
        new = super().spelling(tables, tokens, real)
        counts = tables["counts"][jnp.clip(tokens, 0, tables["counts"].shape[0] - 1)]
        spelt = real & (counts > 1) & (counts <= self.longest)
        return dataclasses.replace(new, grams=learnt(self.grams, tokens, spelt))


def learnt(grams: Array, tokens: Array, new: Array) -> Array:
    """The cache `[B, S]` with those of the tokens `[B, T]` that are `new` `[B, T]`; of equal slots the last one counts."""
    rows, slots = grams.shape
    slot = jnp.where(new, tokens % slots, slots)
    order = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    last = jnp.full((rows, slots), -1, jnp.int32).at[jnp.arange(rows)[:, None], slot].max(order, mode="drop")
    return jnp.where(last >= 0, jnp.take_along_axis(tokens, jnp.maximum(last, 0), axis=1), grams)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The n-grams that are weighed at a place.

    Attributes:
      ids: `[B, K]` int32, the target's tokens.
      tokens: `[B, K, W]` int32, the draft tokens that spell them.
      sizes: `[B, K]` int32, how many these are.
      real: `[B, K]` bool, whether there is one.
    """

    ids: Array
    tokens: Array
    sizes: Array
    real: Array


def chosen(state: Known, tables: Any, logits: Array, count: int) -> Chosen:
    """The `count` cached n-grams whose first token is likeliest, all different.

    Args:
      state: the row's cache.
      tables: the arrays of `specjax.draft.vocabularies.tables.Tables`.
      logits: `[B, V']` float32, of the first token.
      count: K.
    """
    firsts = tables["spelling"][:, 0][jnp.maximum(state.grams, 0)]
    worth = jnp.where(state.grams >= 0, jnp.take_along_axis(logits, firsts, axis=1), -jnp.inf)
    values, at = jax.lax.top_k(worth, count)
    real = values > -jnp.inf
    ids = jnp.where(real, jnp.take_along_axis(state.grams, at, axis=1), 0)
    tokens, sizes = tables["spelling"][ids][..., : state.longest], tables["counts"][ids]
    same = _begins(tokens, sizes) & (sizes[:, :, None] == sizes[:, None])
    earlier = jnp.arange(count)[:, None] < jnp.arange(count)[None]
    return Chosen(ids, tokens, sizes, real & ~jnp.any(same & real[:, :, None] & earlier[None], axis=1))


def _begins(tokens: Array, sizes: Array) -> Array:
    """Whether n-gram i begins n-gram j or is equal to it, `[B, K, K]` bool by i and j."""
    within = jnp.arange(tokens.shape[2])[None, None] < sizes[:, :, None]
    equal = tokens[:, :, None] == tokens[:, None]
    return jnp.all(equal | ~within[:, :, None], axis=3) & (sizes[:, :, None] <= sizes[:, None])


def merged(logits: Array, grams: Chosen, rest: Array) -> tuple[Array, Array]:
    """The chances of the first draft token alone and of the n-grams, if draft tokens are drawn and the longest n-gram that
    they begin with is taken.

    An n-gram's chance is the product of its tokens' probabilities; what longer ones take is taken from the longest
    n-gram that begins them, or else from the first token alone. So the sum stays as it was.

    Args:
      logits: `[B, V']` float32, of the first token.
      grams: those that are weighed.
      rest: `[B, K]` float32, the log-probability of each n-gram's other tokens after its first.

    Returns:
      Logits `[B, V']`, and of the n-grams `[B, K]`, on one scale; -inf for n-grams that are not real.
    """
    tokens, sizes, real = grams.tokens, grams.sizes, grams.real
    chance = jnp.where(real, jnp.exp(rest), 0)
    begins = _begins(tokens, sizes) & (sizes[:, :, None] < sizes[:, None]) & real[:, :, None] & real[:, None]
    longest = jnp.max(jnp.where(begins, sizes[:, :, None], 1), axis=1)
    taken = jnp.where(begins & (sizes[:, :, None] == longest[:, None]), chance[:, None], 0).sum(axis=2)
    first = tokens[:, :, 0]
    alone = (first[:, :, None] == first[:, None]) & (longest == 1)[:, None]
    shadow = jnp.where(alone, chance[:, None], 0).sum(axis=2)
    less = jnp.take_along_axis(logits, first, axis=1)
    rows, at = jnp.arange(logits.shape[0])[:, None], jnp.where(real, first, logits.shape[1])
    scores = jnp.where(real, less + jnp.log(jnp.maximum(chance - taken, 0)), -jnp.inf)
    # n-grams of one first token write the same number
    return logits.at[rows, at].set(less + jnp.log(jnp.maximum(1 - shadow, 0)), mode="drop"), scores
