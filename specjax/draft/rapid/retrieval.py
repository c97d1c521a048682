"""A long prompt made short: its first tokens, the chunks that resemble the question at its end, and the question.

In the shape descriptions `B` denotes rows, `L` the text buffer, `N` chunks, `C` tokens of a chunk, `Q` tokens of a question,
`M` tokens of a shortened prompt.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

K1, B = 1.5, 0.75
"""BM25's usual numbers: how soon a token that occurs again counts no more, and how much the length of a chunk counts."""


@dataclasses.dataclass(frozen=True)
class Shortening:
    """How prompts are shortened; static.

    A prompt is its first `sinks` tokens, then chunks of `chunk` tokens, and then a question of `question` tokens. The
    last chunk may be shorter, and so may every part of a short prompt.

    Attributes:
      chunk: C.
      shorten: by how much the chunks of a very long prompt are to be fewer.
      least: how many tokens of chunks a shorter prompt keeps, if it has so many.
      similarity: what a chunk must reach, see `similarities`.
      question: Q.
      sinks: see above.
      joint: the tokens of a blank line, which stands wherever chunks were left out.
    """

    chunk: int = 128
    shorten: int = 32
    least: int = 4096
    similarity: float = 0.1
    question: int = 64
    sinks: int = 4
    joint: tuple[int, ...] = ()

    def kept(self, length: Any, xp: Any = jnp) -> Any:
        """How many chunks a prompt of so many tokens keeps at most: max(length / (C shorten), min(least, length) / C), up."""
        return xp.maximum(-(-length // (self.chunk * self.shorten)), -(-xp.minimum(self.least, length) // self.chunk))

    def room(self, capacity: int) -> int:
        """M, which prompts of up to `capacity` tokens need."""
        whole = self.sinks + int(self.kept(capacity, np)) * self.chunk + self.question
        return min(whole, capacity) + self.blank(capacity)

    def blank(self, capacity: int) -> int:
        """How many tokens of M blank lines need: one before every chunk, and one before the question."""
        return (int(self.kept(capacity, np)) + 1) * len(self.joint)

    def shortened(self, tokens: Array, length: Array) -> tuple[Array, Array]:
        """Shortened prompts.

        Args:
          tokens: `[B, L]` int32; garbage from `length` on.
          length: `[B]` int32, the prompts' tokens.

        Returns:
          `[B, M]` int32 tokens, 0 after the last; and `[B]` int32, how many there are.
        """
        first = jnp.minimum(self.sinks, length)
        end = jnp.maximum(length - self.question, first)
        count = max(1, -(-(tokens.shape[1] - self.sinks) // self.chunk))
        place = self.sinks + jnp.arange(count * self.chunk).reshape(count, self.chunk)
        chunks, real = jnp.take(tokens, place, axis=1, mode="clip"), place[None] < end[:, None, None]
        at = end[:, None] + jnp.arange(self.question)[None]
        question, asked = jnp.take_along_axis(tokens, at, axis=1, mode="clip"), at < length[:, None]
        chosen = self.chosen(similarities(chunks, real, question, asked), real, self.kept(length))
        begins, to, join, size = self._places(chosen, real, first, length - end)
        room = self.room(tokens.shape[1])
        flat = lambda x: x.reshape(len(length), -1)
        head = jnp.broadcast_to(jnp.arange(self.sinks)[None], (len(length), self.sinks))
        into = [
            jnp.where(head < first[:, None], head, room),
            jnp.where(real & chosen[:, :, None], to, room),
            jnp.where(asked, begins[:, None] + jnp.arange(self.question)[None], room),
            jnp.where(join >= 0, join, room),
        ]
        joint = jnp.broadcast_to(jnp.asarray(self.joint, jnp.int32), join.shape)
        parts = [jnp.take(tokens, jnp.arange(self.sinks), axis=1, mode="clip"), chunks, question, joint]
        put = lambda at, values: jnp.zeros((room,), jnp.int32).at[at].set(values, mode="drop")
        text = jax.vmap(put)(*(jnp.concatenate([flat(x) for x in own], axis=1) for own in (into, parts)))
        return text, size

    def chosen(self, similar: Array, real: Array, kept: Array) -> Array:
        """Which chunks `[B, N]` stay: at most `kept` `[B]` of the most similar ones, the earlier one of equal ones.

        Args:
          similar: `[B, N]`, see `similarities`.
          real: `[B, N, C]`, which places hold tokens of a chunk.
          kept: see above.
        """
        able = real[:, :, 0] & (similar >= self.similarity)
        order = jnp.argsort(jnp.where(able, -similar, jnp.inf), axis=1)  # stable
        rank = jnp.argsort(order, axis=1)
        return able & (rank < kept[:, None])

    def _places(self, chosen: Array, real: Array, first: Array, asked: Array) -> tuple[Array, Array, Array, Array]:
        """Where the parts of shortened prompts stand: where the question begins `[B]`, each chunk's tokens `[B, N, C]`, the
        blank lines `[B, N + 1, J]` (-1: none), and the size of the whole `[B]`."""
        sizes, blank = real.sum(axis=2), len(self.joint)
        # nothing is left out between the first tokens and the first chunk
        before = jnp.pad(chosen, ((0, 0), (1, 0)), constant_values=True)[:, :-1]
        gap = chosen & ~before
        width = jnp.where(chosen, sizes + gap * blank, 0)
        starts = first[:, None] + jnp.cumsum(width, axis=1) - width
        to = (starts + gap * blank)[:, :, None] + jnp.arange(self.chunk)[None, None]
        last = jnp.maximum(real[:, :, 0].sum(axis=1) - 1, 0)
        left_out = real[:, 0, 0] & ~jnp.take_along_axis(chosen, last[:, None], axis=1)[:, 0]
        end = first + width.sum(axis=1)
        begins = end + left_out * blank
        lines = jnp.concatenate([jnp.where(gap, starts, -1), jnp.where(left_out, end, -1)[:, None]], axis=1)
        join = jnp.where(lines[:, :, None] >= 0, lines[:, :, None] + jnp.arange(blank)[None, None], -1)
        return begins, to, join, begins + asked


def similarities(chunks: Array, real: Array, question: Array, asked: Array) -> Array:
    """How much of a question each chunk holds, `[B, N]` float32: BM25 of its tokens, as a share of the question's weight.

    Tokens of the question that are in no chunk have no weight. A chunk of average length in which each of the others
    occurs once has similarity 1; where they occur again it may be 2.5 at most.

    Args:
      chunks: `[B, N, C]` int32.
      real: `[B, N, C]` bool, which of these are tokens.
      question: `[B, Q]` int32.
      asked: `[B, Q]` bool, which of these are tokens.
    """
    same = (chunks[:, None] == question[:, :, None, None]) & real[:, None] & asked[:, :, None, None]
    often = same.sum(axis=3, dtype=jnp.float32)  # [B, Q, N]
    sizes = real.sum(axis=2, dtype=jnp.float32)
    count = (sizes > 0).sum(axis=1, dtype=jnp.float32)[:, None]
    within = (often > 0).sum(axis=2, dtype=jnp.float32)
    weight = jnp.where(within > 0, jnp.log1p((count - within + 0.5) / (within + 0.5)), 0.0)
    share = sizes * count / jnp.maximum(sizes.sum(axis=1, keepdims=True), 1)
    counted = often * (K1 + 1) / (often + K1 * (1 - B + B * share)[:, None])
    return (weight[:, :, None] * counted).sum(axis=1) / jnp.maximum(weight.sum(axis=1), 1e-9)[:, None]
