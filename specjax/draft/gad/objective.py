"""Training of block drafters: a random beginning of a text, a block of masks after it, and glances at some of them
(Xia et al. 2022, arXiv:2203.16487; Qian et al. 2021, arXiv:2008.07905).

In the shape descriptions `S` denotes source slots, `W` the slots of a pass: those of a text, and the block's `K`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import chunked
from specjax.lm import Block, Source, Wants
from specjax.objectives.base import Batch, Recipe, each_row
from specjax.objectives.draft import OfDraft
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import positions_at_a_time

Array = jax.Array


class Blocks(NamedTuple):
    """The texts of a batch as a pass reads them, each after its start tokens.

    Attributes:
      tokens: `[B, W]` int32, the text's own.
      seen: `[B, W]` bool, the beginning and the block after it.
      masked: `[B, W]` bool, the block; its slots after the text's end are masks too.
      due: `[B, W]` bool, those of the block that the text has.
      slots: `[B, K]` int32, the block's, in order.
    """

    tokens: Array
    seen: Array
    masked: Array
    due: Array
    slots: Array

    def of(self, values: Array) -> Array:
        """`[B, K]`, the block's own of the values `[B, W]` of a pass."""
        return jnp.take_along_axis(values, self.slots, axis=1)

    def spread(self, values: Array) -> Array:
        """`[B, W]`, the block's values `[B, K]` where they belong in a pass; False elsewhere."""
        at = jnp.arange(self.masked.shape[1])[None] - self.slots[:, :1]
        return self.masked & jnp.take_along_axis(values, jnp.clip(at, 0, values.shape[1] - 1), axis=1)


@dataclasses.dataclass(frozen=True)
class TrainGad(OfDraft):
    """Fits a model that sees both ways to the text's own tokens, which should be the target's own outputs.

    A row is a source, its prompt, and a text. Of a text of n tokens, a pass reads the first r, drawn from 0 to n - 1,
    and `block` masks after them. A first pass, without gradient, predicts the masks. Of h wrong ones, `floor(share h)`
    masks show their token in the second pass, drawn among all. The others are learned, with smoothed labels.

    One point is this library's. The authors' share falls from `most` to `least` over a run; here every row draws its
    own between the two.

    Attributes:
      target: the target, whose texts are learned; it does not run.
      draft: the model that is trained, with the target's columns.
      starts: the tokens that a text begins with.
      mask: the id that is read as a mask; -1 for the one that the draft's folder names, or a token that is not in use.
      block: masks of a pass.
      smoothing: the share of a label that all tokens have evenly.
      most: the largest share of wrong masks that show their tokens.
      least: the smallest one.
    """

    recipe = Recipe(clip=5.0, weight_decay=0.01)
    lines = "sourced"

    starts: tuple[int, ...] = ()
    mask: int = -1
    block: int = 25
    smoothing: float = 0.1
    most: float = 0.5
    least: float = 0.3

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"gad: block must be at least 1, got {self.block}")
        if not (0 <= self.smoothing < 1 and 0 <= self.least <= self.most <= 1):
            raise ValueError(
                "gad needs smoothing in [0, 1) and 0 <= least <= most <= 1, got "
                f"smoothing={self.smoothing}, least={self.least}, most={self.most}"
            )

    @property
    def packed(self):
        return False

    def blocks(self, batch: Batch, drawn: Array) -> Blocks:
        """What a pass reads of the texts; `drawn` `[B]`, in [0, 1), chooses their beginnings."""
        rows, length = batch.tokens.shape
        first, size = jnp.argmax(batch.mask, axis=1), batch.mask.sum(axis=1)
        before = len(self.starts)
        slots = jnp.arange(before + length + self.block)[None]
        at = slots - before
        own = jnp.take_along_axis(batch.tokens, jnp.clip(first[:, None] + at, 0, length - 1), axis=1)
        starts = jnp.asarray((*self.starts, 0), jnp.int32)
        tokens = jnp.where(at < 0, jnp.take(starts, jnp.minimum(slots, before)), own)
        begun = jnp.maximum(size - 1 - jnp.floor(drawn * size).astype(size.dtype), 0)[:, None]
        masked = (at >= begun) & (at < begun + self.block)
        slots = before + begun + jnp.arange(self.block)[None]
        return Blocks(tokens, at < begun + self.block, masked, masked & (at < size[:, None]), slots)

    def source(self, batch: Batch) -> Source:
        """The rows' prompts."""
        first = jnp.argmax(batch.mask, axis=1).astype(jnp.int32)
        own = jnp.arange(batch.tokens.shape[1])[None] < first[:, None]
        return Source(jnp.where(own, batch.tokens, -1), jnp.maximum(first, 1))

    def told(
        self, params: Any, cache: Any, blocks: Blocks, shown: Array, make: Callable[[Array, Array], Any], at_a_time: int
    ) -> Any:
        """What a pass says of the block, made for some of its slots at a time.

        Args:
          params: the draft's.
          cache: after the encoder.
          blocks: what the pass reads.
          shown: `[B, K]` bool, masks that are their tokens in this pass.
          make: from logits `[B, K, V]` and the text's tokens `[B, K]`.
          at_a_time: how many of a row's slots have logits at a time.
        """
        tokens = jnp.where(blocks.masked & ~blocks.spread(shown), self.mask, blocks.tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        block = Block(tokens, positions, jnp.zeros(len(tokens), jnp.int32), blocks.seen[:, None], causal=False)
        final = self.draft(params, block, cache, wants=Wants(final=True)).final
        final = jnp.take_along_axis(final, blocks.slots[:, :, None], axis=1)
        compare = lambda inputs: make(self.draft.unembed(params, inputs[0]), inputs[1])
        return chunked(compare, (final, blocks.of(blocks.tokens)), at_a_time)

    def costs(self, logits: Array, labels: Array) -> Array:
        """`[B, K]`, the cross-entropy to smoothed labels."""
        logs = jax.nn.log_softmax(logits, axis=-1)
        own = jnp.take_along_axis(logs, labels[:, :, None], axis=2)[:, :, 0]
        return -(1 - self.smoothing) * own - self.smoothing * logs.mean(axis=-1)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        rows, length = batch.tokens.shape
        wide = length + len(self.starts) + self.block
        drawn = each_row(lambda key: jax.random.uniform(key, (wide + 2,)), key, rows)
        blocks = self.blocks(batch, drawn[:, 0])
        cache = self.draft.encode(params, self.draft.init_cache(rows, wide), self.source(batch))
        due, few = blocks.of(blocks.due), positions_at_a_time(batch)
        agreed = lambda logits, labels: jnp.argmax(logits, axis=-1) == labels
        right = self.told(*jax.lax.stop_gradient((params, cache)), blocks, jnp.zeros_like(due), agreed, few) & due
        share = self.least + (self.most - self.least) * drawn[:, 1]
        shown = chosen(due, blocks.of(drawn[:, 2:]), jnp.floor(share * (due.sum(axis=1) - right.sum(axis=1))))
        learned = due & ~shown
        each = self.told(params, cache, blocks, shown, self.costs, few)
        run = jnp.cumprod(right | ~due, axis=1) * due
        metrics = {
            "accuracy": mean(right.astype(jnp.float32), due),
            "accepted": mean(run.sum(axis=1, keepdims=True).astype(jnp.float32), due.any(axis=1, keepdims=True)),
            "weight": learned.sum(),
        }
        return mean(each, learned), metrics

    def merit(self, metrics):
        """How many tokens of a block are right, up to the first that is not."""
        return metrics["accepted"]


def chosen(places: Array, drawn: Array, count: Array) -> Array:
    """`count` `[B]` of every row's `places` `[B, K]`, by the order of what was `drawn` `[B, K]`, in [0, 1)."""
    order = jnp.argsort(jnp.where(places, drawn, 2.0), axis=1)
    rank = jnp.argsort(order, axis=1)
    return places & (rank < count[:, None])
