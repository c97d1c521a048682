"""The common part of objectives over a text cut at random places: slots after a cut learn what the target says further on.

In the shape descriptions `R` denotes cuts per row, `m` guesses after a cut, `X` slots, `V` the vocabulary.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import Block, Output, Wants
from specjax.objectives.base import Batch, Objective, drawn_places, read
from specjax.objectives.losses import ForwardKL, Loss, acceptance, agreement
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import of_depth

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class CutObjective(Objective):
    """A frozen target teaches its own slots: guess j after a cut learns the target's distribution j tokens further on.

    The loss is the mean over each guess's own loss, weighted `decay ** j` for the j-th, from 0.

    Text and slots pass through the target once. The text goes first, so that no gradient is taken through it; the slots
    of all cuts follow as one block over its keys and values.

    Attributes:
      drafter: bound to the target.
      cuts: places per row, at most as many as it has.
      decay: see above.
      divergence: between the distributions.
    """

    drafter: Any
    cuts: int = 16
    decay: float = 0.8
    divergence: Loss = ForwardKL()

    def __post_init__(self):
        name = type(self.drafter).about.name
        if self.drafter.target is None:
            raise ValueError(f"{name}: bind the drafter to its target first")
        if self.cuts < 1 or not 0 < self.decay <= 1:
            raise ValueError(
                f"{name}: cuts must be at least 1 and decay lie in (0, 1], got cuts={self.cuts} and decay={self.decay}"
            )

    @property
    @abc.abstractmethod
    def guesses(self) -> int:
        """Static: m."""

    @property
    def text_wants(self) -> Wants:
        """Static: what `said` reads of the target's output for the text, besides its final features."""
        return Wants()

    @abc.abstractmethod
    def said(self, params: PyTree, target_params: PyTree, batch: Batch, at: Array, text: Output) -> Array:
        """The guesses' logits `[B, R * m, V]`, cut by cut.

        Args:
          params: the trained parameters.
          target_params: the target's.
          batch: the rows.
          at: `[B, R]` int32, the last slot of the text before each cut.
          text: the target's output for the rows, without gradient.
        """

    def init(self, key, target_params):
        return self.drafter.init_params(key, target_params)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        target, draft, mask = self._distributions(params, target_params, batch, key)
        count = self.guesses
        at = self._places(batch, key)[0][:, :, None] + 2 + jnp.arange(count)[None, None]
        labels = jnp.take_along_axis(
            batch.tokens, jnp.minimum(at, batch.tokens.shape[1] - 1).reshape(len(at), -1), axis=1
        )
        every = lambda j: [x[:, j::count] for x in (target, draft, mask, labels)]
        losses = jnp.stack([self.decay**j * self.divergence(*every(j), mean=mean) for j in range(count)])
        metrics = {"weight": mask.sum(), "agreement": mean(agreement(target, draft), mask)}
        kept = acceptance(target, draft)
        for j in range(count):
            metrics[of_depth("acceptance", j)] = mean(kept[:, j::count], mask[:, j::count])
        return losses.mean(), metrics

    def accuracy(
        self, params: PyTree, target_params: PyTree, batch: Batch, key: Array, ranks: int
    ) -> tuple[Array, Array]:
        """How often the target's likeliest token is the candidate of a rank of each guess, on a batch's random cuts.

        Returns:
          Counts `[m, ranks]`, and the number of cases `[m]`. Their quotient is the input of a search for trees.
        """
        target, draft, mask = self._distributions(params, target_params, batch, key)
        candidates = jax.lax.top_k(draft, ranks)[1]
        hits = (candidates == jnp.argmax(target, axis=-1)[..., None]) & mask[..., None]
        hits, mask = hits.reshape(-1, self.guesses, ranks), mask.reshape(-1, self.guesses)
        return hits.sum(axis=0), mask.sum(axis=0)

    def slots(self, batch: Batch, at: Array, place: Array, step: Array, own: Array) -> Block:
        """The slots of all cuts as a block over the text, which is its past.

        Args:
          batch: the rows.
          at: see `said`.
          place: `[X]` int32, each slot's cut.
          step: `[X]` int32, its place after the cut, from 0.
          own: `[X, X]` bool, which slots each sees.
        """
        rows, length = batch.tokens.shape
        before = jnp.arange(length)[None, None] <= at[:, place][:, :, None]
        seen = before & batch.seen(at)[:, place]  # [B, X, T]
        return Block(
            tokens=jnp.zeros((rows, place.shape[0]), jnp.int32),
            positions=jnp.take_along_axis(batch.positions, at, axis=1)[:, place] + 1 + step[None],
            length=jnp.zeros((rows,), jnp.int32),
            visible=jnp.concatenate([seen, jnp.broadcast_to(own[None], (rows, *own.shape))], axis=2),
        )

    def _places(self, batch, key):
        """Where texts are cut `[B, R]`, and at which cuts the first guess has something to learn."""
        return drawn_places(key, jnp.pad(batch.due(2), ((0, 0), (0, 2))), self.cuts)

    def _distributions(self, params, target_params, batch, key):
        """Logits `[B, R * m, V]` of the target and of the guesses, and where both are known `[B, R * m]`."""
        lm, count = self.drafter.target, self.guesses
        rows, length = batch.tokens.shape
        at, chosen = self._places(batch, key)
        text = read(lm, target_params, batch, self.text_wants | Wants(final=True))

        ahead = at[:, :, None] + jnp.arange(1, count + 1)[None, None]  # [B, R, m]
        flat = ahead.reshape(rows, -1)
        due = (batch.seen(at) & batch.mask[:, None]).reshape(rows, -1)
        row = jnp.repeat(jnp.arange(at.shape[1]), count)[None] * length
        known = jnp.take_along_axis(due, row + jnp.minimum(flat + 1, length - 1), axis=1) & (flat + 1 < length)
        known = known & jnp.repeat(chosen, count, axis=1)
        final = jnp.take_along_axis(text.final, jnp.minimum(flat, length - 1)[:, :, None], axis=1)
        target = jax.lax.stop_gradient(lm.unembed(target_params, final))
        return target, self.said(params, target_params, batch, at, text), known
