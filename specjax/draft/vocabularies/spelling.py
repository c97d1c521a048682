"""The text as a draft model of another vocabulary reads it: its own tokens, which spell those that were committed.

Shapes: `B` rows, `L` the target's tokens, `M` the draft model's.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from specjax.lm import LM, Block, Wants

Array = jax.Array
PyTree = Any

WIDEST = 64
"""The most tokens that a pass reads of a text, so that the last one does not leave the cache."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spelt:
    """The state of a draft model with a text of its own.

    Attributes:
      cache: the draft model's cache, made of committed text only.
      length: `[B]` int32, how many of its tokens are in the cache.
      tokens: `[B, M]` int32, its text.
      count: `[B]` int32, how long that is.
      seen: `[B]` int32, how many of the target's tokens it spells.
      cut: `[B]` bool, whether the text has outgrown M.
    """

    cache: Any
    length: Any
    tokens: Any
    count: Any
    seen: Any
    cut: Any

    @classmethod
    def empty(cls, lm: LM, batch: int, capacity: int, dtype: Any) -> "Spelt":
        """Of empty texts with room for `capacity` tokens of the draft model."""
        none = lambda: jnp.zeros((batch,), jnp.int32)  # each of its own: a state is given away once
        cache = lm.init_cache(batch, capacity + WIDEST, dtype)
        return cls(cache, none(), jnp.zeros((batch, capacity), jnp.int32), none(), none(), jnp.zeros((batch,), bool))

    def axes(self, lm: LM) -> "Spelt":
        """See `specjax.draft.Drafter.axes`."""
        rows = ("batch",)
        return Spelt(lm.cache_axes(self.cache), rows, ("batch", None), rows, rows, rows)

    def spelling(self, tables: PyTree, tokens: Array, real: Array) -> Self:
        """With the target's next tokens spelt at its end.

        Args:
          tables: the arrays of `specjax.draft.vocabularies.tables.Tables`.
          tokens: `[B, T]` int32, those from `seen` on.
          real: `[B, T]` bool, a beginning of them.
        """
        rows, room = self.tokens.shape
        ids = jnp.clip(tokens, 0, tables["counts"].shape[0] - 1)
        own, counts = tables["spelling"][ids], jnp.where(real, tables["counts"][ids], 0)
        place = jnp.arange(own.shape[2])[None, None]
        at = (self.count[:, None] + jnp.cumsum(counts, axis=1) - counts)[:, :, None] + place
        at = jnp.where(place < counts[:, :, None], at, room).reshape(rows, -1)
        text = self.tokens.at[jnp.arange(rows)[:, None], at].set(own.reshape(rows, -1), mode="drop")
        total = self.count + counts.sum(axis=1)
        return dataclasses.replace(
            self,
            tokens=text,
            count=jnp.minimum(total, room),
            seen=self.seen + real.sum(axis=1, dtype=jnp.int32),
            cut=self.cut | (total > room),
        )

    def passed(self, lm: LM, params: PyTree, width: int, count: Array, wants: Wants) -> tuple[Self, Any]:
        """With the next `count` `[B]` tokens of its text in the cache, at most `width`, and the pass's output."""
        at = self.length[:, None] + jnp.arange(width)[None]
        block = Block(jnp.take_along_axis(self.tokens, at, axis=1, mode="clip"), at, self.length)
        output = lm(params, block, self.cache, wants=wants)
        # The write depends on the reads, so that the cache is updated in place, as in `specjax.draft.model`.
        firsts = [x[:, :1].reshape(x.shape[0], -1)[:, 0] for x in jax.tree.leaves(output.delta)]
        after = jnp.where(jnp.isnan(sum(x.astype(jnp.float32) for x in firsts)), 0, self.length)
        cache = lm.commit(self.cache, output.delta, None, after, count)
        return dataclasses.replace(self, cache=cache, length=self.length + count), output

    def read(self, lm: LM, params: PyTree, width: int, leave: int, live: Array | None = None) -> Self:
        """With its text read, as many passes of `width` tokens as that takes, but for the last `leave` tokens.

        A row's passes do not depend on other rows.
        """
        left = lambda own: own.count - own.length - leave
        within = True if live is None else live

        def once(own):
            return own.passed(lm, params, width, jnp.clip(left(own), 0, width), Wants())[0]

        return jax.lax.while_loop(lambda own: jnp.any(within & (left(own) > 0)), once, self)
