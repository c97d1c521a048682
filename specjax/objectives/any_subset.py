"""Training of any-subset models (arXiv:2504.20456): the loss of open positions, each given the known ones and those before it.

In the shape descriptions `B` denotes rows, `T` tokens per row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import chunked
from specjax.objectives.base import Batch, OfTarget, Recipe, each_row
from specjax.objectives.losses import surprise
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import positions_at_a_time

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AnySubsetLoss(OfTarget):
    """Cross-entropy of the open positions of every text, in an order that the decoder uses (the paper's section 4).

    A share of a text's tokens, drawn for each row, is open; a prompt's tokens never are. Known positions see all known
    ones. Open ones, from left to right, see the known ones and the open ones before them. So a text has 2^T orders, one
    for each set of open positions. The authors draw one share and one order for a batch; here each row has its own.

    The share is drawn evenly between two bounds, which begin at `first` and reach `low` and `high` after a part of all
    updates. The defaults are those of the authors' script, with 1e-5 as learning rate and 5,000 updates of warm-up for
    rate and share. Their script for infilling has 0.6 and 0.75, their code's defaults are 0.75 and 0.85.

    Attributes:
      lm: the model that is trained (`specjax.models.xlnet.XlnetLM`).
      low: the lowest share of open positions.
      high: the highest one.
      first: the share at the first update.
      warmup: the part of all updates after which the bounds are reached; the default is that of the learning rate.
      parallel: the authors' other loss. Open positions see no open ones. Those that are known are drawn ones, a part of
        them, and the first of the others, as in the middle of decoding.

    Raises:
      ValueError: for shares out of (0, 1), a low one above the high one, or a warm-up out of [0, 1].
    """

    recipe = Recipe(weight_decay=0.01)

    lm: Any
    low: float = 0.85
    high: float = 0.99
    first: float = 0.15
    warmup: float = 0.05
    parallel: bool = False

    def __post_init__(self):
        if not (0 < self.low <= self.high < 1 and 0 < self.first < 1 and 0 <= self.warmup <= 1):
            raise ValueError(
                "any_subset needs 0 < low <= high < 1, first in (0, 1) and warmup in [0, 1], got "
                f"low={self.low}, high={self.high}, first={self.first}, warmup={self.warmup}"
            )

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """The loss in nats; `accuracy` is how often the likeliest token is the text's, over all open positions."""
        opened, sees = self.orders(batch, key)
        places = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None], batch.tokens.shape)
        final = self.lm.read(params, batch.tokens, sees, places)

        def compare(inputs):
            final, labels = inputs
            logits = self.lm.unembed(params, final)
            right = jax.lax.stop_gradient(jnp.argmax(logits, axis=-1) == labels)
            return surprise(logits, labels), right.astype(jnp.float32)

        nats, right = chunked(compare, (final, batch.tokens), positions_at_a_time(batch))
        return mean(nats, opened), {"accuracy": mean(right, opened), "weight": opened.sum()}

    def orders(self, batch: Batch, key: Array) -> tuple[Array, Array]:
        """Which positions are open `[B, T]`, and which ones each position sees `[B, T, T]`, both bool."""
        rows, width = batch.tokens.shape
        drawn = each_row(lambda key: jax.random.uniform(key, (width + 2,)), key, rows)
        share = self.share(batch.done, drawn[:, 0])
        there = jnp.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1] > 0  # up to the last token that may be open
        free, count = batch.mask, batch.mask.sum(axis=1)
        least = jnp.where(jnp.any(there & ~free, axis=1), 0, 1)  # one position at least is known
        opened = jnp.clip(jnp.floor(share * count).astype(jnp.int32), 1, jnp.maximum(count - least, 1))
        known = count - opened
        sooner = jnp.where(free, drawn[:, 2:], jnp.inf)
        if self.parallel:
            given = jnp.clip(jnp.floor(drawn[:, 1] * (1 - share) * count).astype(jnp.int32) + 1, least, known)
            first = _first(sooner, given)
            sooner = jnp.where(first, -1.0, jnp.where(free, jnp.arange(width, dtype=jnp.float32)[None], jnp.inf))
        opened = free & ~_first(sooner, known)
        seen = there & ~opened
        sees = jnp.broadcast_to(seen[:, None], (rows, width, width))
        if not self.parallel:
            before = jnp.tril(jnp.ones((width, width), bool), -1)[None]
            sees = sees | (opened[:, :, None] & opened[:, None] & before)
        return opened, sees & there[:, :, None]

    def share(self, done: Array | None, drawn: Array) -> Array:
        """The share of open positions `[B]` after a part of all updates `[B]`; `drawn` `[B]`, in [0, 1), chooses."""
        part = jnp.ones_like(drawn) if done is None or not self.warmup else jnp.minimum(done / self.warmup, 1)
        low, high = (self.first + (bound - self.first) * part for bound in (self.low, self.high))
        return low + (high - low) * drawn


def _first(values: Array, count: Array) -> Array:
    """Which values `[B, T]` are among the `count` `[B]` lowest of their row; of equal ones the first."""
    ranks = jnp.argsort(jnp.argsort(values, axis=1, stable=True), axis=1, stable=True)
    return ranks < count[:, None]
