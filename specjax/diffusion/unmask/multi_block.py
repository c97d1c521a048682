"""Blocks that open before earlier ones are finished: discrete diffusion forcing (D2F, arXiv:2508.09192) and d3LLM
(arXiv:2601.07568).

In the shape descriptions `K` denotes the blocks of a canvas.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.arrays import Array
from specjax.diffusion.unmask.base import Choice, Lasting, confidence, negative_entropy


@dataclasses.dataclass(frozen=True)
class MultiBlock(Lasting):
    """Works on several blocks at once: the next one opens when a share `add` of the last open one is known.

    D2F's rule writes all predictions surer than `threshold` in the open blocks. A block is complete once a share
    `complete` of the block before it is known. Where such a block has no sure prediction, its surest one is written.
    With the cache `block_causal` this is the published decoder of D2F's models.

    With `entropy`, d3LLM's rule writes all predictions of at most so much entropy, and always the one of the least. The
    first unfinished block gets at least one token. `complete` has no part in it.

    Attributes:
      threshold: the probability that a sure prediction exceeds.
      add: the share of the last open block that is known when the next one opens.
      complete: the share of a block that is known when the next one is complete.
      entropy: of d3LLM's rule, in nats; 0: D2F's.
    """

    about = About("multi_block", "blocks open before earlier ones are finished", "arXiv:2508.09192", "lossy")

    threshold: float = 0.9
    add: float = 0.1
    complete: float = 0.95
    entropy: float = 0.0

    def __post_init__(self):
        if not self.threshold >= 0 or not 0 < self.add <= 1 or not 0 < self.complete <= 1 or not self.entropy >= 0:
            raise ValueError(
                f"multi_block needs threshold >= 0, add and complete in (0, 1] and entropy >= 0, got {self}"
            )

    @property
    def opens(self):
        return True

    @property
    def warped(self):
        """The model's own distribution for d3LLM's rule, as in the original."""
        return False if self.entropy else None

    def init(self, batch, width, vocab_size):
        """How many blocks are open, `[B]` int32."""
        return jnp.ones((batch,), jnp.int32)

    def blocks_open(self, memory):
        return memory

    def __call__(self, guess, memory):
        view, width = guess.overview, guess.masked.shape[1]
        blocks = -(-view.place.shape[1] // width)
        of = jnp.where(view.place < 0, blocks, view.place // width)
        total = _by_block(view.masked | view.known, of, blocks)
        left = _by_block(view.masked, of, blocks)
        score = negative_entropy(view) if self.entropy else confidence(view)
        may = view.open & (of < memory[:, None])
        if self.entropy:
            write = may & ((-score <= self.entropy) | _first_best(score, may))
            begun = jnp.cumsum(left, axis=1)
            forced = (left > 0) & (begun == left)  # the first block that is not finished
        else:
            write = may & (score > self.threshold)
            before = jnp.pad(_share(left, total)[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)
            forced = before >= self.complete
        lacking = forced & (_by_block(write, of, blocks) == 0)
        write = write | self._surest(score, may, of, lacking)
        left = left - _by_block(write, of, blocks)
        last = jnp.take_along_axis(_share(left, total), memory[:, None] - 1, axis=1)[:, 0]
        first = jnp.argmax(left > 0, axis=1)  # known text between open spans may lie before it
        count = jnp.minimum(jnp.maximum(memory + (last >= self.add), first + 1), view.blocks)
        active = (view.place >= 0) & (view.at >= view.after[:, None] - width) & (view.at < view.after[:, None])
        slots = (view.after - width - view.at[:, 0])[:, None] + jnp.arange(width)[None]
        own = lambda x: jnp.take_along_axis(x, slots, axis=1, mode="clip")
        choice = Choice(
            own(write) & guess.masked, own(score), guess.tokens, besides=jnp.where(write & ~active, view.tokens, -1)
        )
        return choice, count

    def _surest(self, score, may, of, lacking):
        """The surest position of each block that is `lacking` `[B, K]`, the first one of equals, `[B, N]` bool."""
        rows = jnp.arange(of.shape[0])[:, None]
        score = jnp.where(may, score, -jnp.inf)
        best = jnp.full(lacking.shape, -jnp.inf).at[rows, of].max(score, mode="drop")
        equal = may & (score == jnp.take_along_axis(best, of, axis=1, mode="clip"))
        at = jnp.arange(of.shape[1], dtype=jnp.int32)[None]
        first = jnp.full(lacking.shape, of.shape[1]).at[rows, of].min(jnp.where(equal, at, of.shape[1]), mode="drop")
        chosen = jnp.take_along_axis(jnp.where(lacking, first, -1), of, axis=1, mode="clip")
        return equal & (at == chosen)


def _by_block(flags: Array, of: Array, blocks: int) -> Array:
    """How many positions `[B, K]` of each block have a flag `[B, N]`; `of` `[B, N]` are their blocks."""
    return jax.vmap(lambda flags, of: jnp.zeros((blocks,), jnp.int32).at[of].add(flags, mode="drop"))(flags, of)


def _share(left: Array, total: Array) -> Array:
    """The known share `[B, K]` of blocks with so many open positions of a `total`."""
    return 1 - left / jnp.maximum(total, 1)


def _first_best(score: Array, may: Array) -> Array:
    """The first position of the highest score in each row, `[B, N]` bool."""
    best = jnp.argmax(jnp.where(may, score, -jnp.inf), axis=1)
    return jnp.arange(score.shape[1])[None] == best[:, None]
