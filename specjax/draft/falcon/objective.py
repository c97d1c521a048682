"""Training of Falcon's layer: coupled sequential glancing distillation (Gao et al. 2024, arXiv:2412.12639, section 3.2)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax.draft.eagle.objective import smooth_l1, taught
from specjax.lm import Block
from specjax.objectives.base import Batch, Recipe, check_not_negative, each_row
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, agreed, score

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainFalcon(HeadObjective):
    """The target is frozen; the output of pair t learns feature t + k and the distribution after it, in blocks of k.

    A first pass without gradient counts the wrong tokens of every row. For a share of that number, a block's first pairs
    are replaced by the pairs that they should lead to, feature and token together. So the block's later pairs learn how
    they depend on its earlier tokens. A second pass over these pairs is what is learned from.

    The authors' share falls from 0.45 to 0.1 over its epochs; here it is constant. Their dropout between the layers of
    the LSTM is left out, and so is a temperature of 0.95 in their divergence.

    Attributes:
      feature_weight: of the smooth L1 distance between an output and the target's feature.
      distribution_weight: of the distributions' divergence.
      noise: see TrainEagle.
      glance: how many blocks have replaced pairs, as a share of the wrong tokens; with k > 2, divided by k. 0: none.
    """

    recipe = Recipe(0.5, clip_by="value", weight_decay=0.01)
    saved = ("block", "carries")

    feature_weight: float = 1.0
    distribution_weight: float = 0.1
    noise: float = 0.1
    glance: float = 0.28

    def __post_init__(self):
        check_not_negative("falcon", self, "feature_weight", "distribution_weight", "noise", "glance")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter, k = self.drafter, self.drafter.block
        teacher, features, noisy = taught(self, target_params, batch, key)
        width = batch.tokens.shape[1] - 1 - k  # pairs whose answer is in the row

        def guess(params, pairs, read):
            own = {"target": target_params, "draft": params}
            told = drafter.read(own, read, pairs, None)[0][:, :width]
            besides = self.feature_weight * smooth_l1(told, features[:, k:-1])
            return Guess(told, functools.partial(drafter.logits, own), k, self.distribution_weight, besides)

        pairs, read = relaxed(batch, k), noisy[:, :-1]
        if self.glance:
            due = batch.due(k + 1)
            wrong = due & ~agreed(teacher, guess(jax.lax.stop_gradient(params), pairs, read))
            count = jnp.floor(self.glance * wrong.sum(axis=1)).astype(jnp.int32) // (k if k > 2 else 1)
            seen = glanced(jnp.pad(due, ((0, 0), (0, k))), pairs.positions % k, count, k, key)
            read = jnp.where(seen[..., None], jnp.roll(features, -k, axis=1)[:, :-1], read)
            tokens = jnp.where(seen, jnp.roll(pairs.tokens, -k, axis=1), pairs.tokens)
            pairs = dataclasses.replace(pairs, tokens=tokens)
        return score(teacher, [guess(params, pairs, read)], self.divergence, mean)

    def held_out(self, target_params):
        return dataclasses.replace(self, noise=0.0, glance=0.0), target_params


def relaxed(batch: Batch, k: int) -> Block:
    """The pairs as a head reads them whose blocks of k pairs begin with every document, and see all of themselves."""
    pairs = batch.pairs()
    blocks = pairs.positions // k
    visible = blocks[:, None] <= blocks[:, :, None]
    if batch.documents is not None:  # a pair across two documents belongs to neither
        documents = jnp.where(batch.together(1), batch.documents[:, 1:], -1)
        visible &= documents[:, None] == documents[:, :, None]
    return dataclasses.replace(pairs, visible=visible)


def glanced(due: Array, places: Array, count: Array, k: int, key: Array) -> Array:
    """Which pairs are replaced: in random blocks of every row, the first one to k - 1, as many as a draw says.

    Args:
      due: `[B, W]` bool, pairs that learn; a block's first pair must be one.
      places: `[B, W]` int32, the place of every pair in its block.
      count: `[B]` int32, how many blocks.
      k: the pairs of a block.
      key: one key, or one per row.

    Returns:
      `[B, W]` bool; only pairs of `due`.
    """

    def drawn(key):
        of_blocks, of_lengths = jax.random.split(jax.random.fold_in(key, 1))
        shape = due.shape[1:]
        return jax.random.uniform(of_blocks, shape), jax.random.randint(of_lengths, shape, 1, k)

    value, lengths = each_row(drawn, key, len(due))
    value = jnp.where(due & (places == 0), value, -1.0)
    rank = jnp.argsort(jnp.argsort(-value, axis=1), axis=1)
    lengths = jnp.where((value >= 0) & (rank < count[:, None]), lengths, 0)
    first = jnp.maximum(jnp.arange(due.shape[1])[None] - places, 0)
    return due & (places < jnp.take_along_axis(lengths, first, axis=1))
