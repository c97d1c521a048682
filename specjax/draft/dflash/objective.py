"""Training of DFlash: blocks that begin at random tokens of a text (arXiv:2602.06036, deepseek-ai/DeepSpec)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.feature import SIZES
from specjax.kernels.chunks import chunked
from specjax.lm import Block
from specjax.models.kv import KVDelta
from specjax.objectives.base import Batch, drawn_places
from specjax.objectives.losses import CrossEntropy, acceptance, agreement, surprise
from specjax.objectives.means import MEAN, Mean
from specjax.objectives.teacher import HeadObjective, of_depth, positions_at_a_time, teach

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainDFlash(HeadObjective):
    """The target is frozen; a block is compared with the target's distributions along the text.

    The loss is one mean over all places of all blocks. The j-th place of a block weighs `exp(-(j - 1) / gamma)`, and
    counts only if all before it do.

    With `dpace` its weight is the derivative of the expected accepted length by the logarithm of its own confidence
    instead (D-PACE, arXiv:2605.18810, as in vllm-project/speculators): the sum over its own and later places of the
    product of all confidences up to there. A confidence is `(1 - dpace) q + dpace`, where q is the draft's probability of
    the text's own token. The sum of weighted losses is divided by the number of places.

    Blocks begin at different tokens, drawn anew for every batch. If at most `anchors` tokens have a next one to be
    predicted, all of them are used (the published number; `preset=small` has fewer). Unlike DeepSpec's, a block may
    begin at the prompt's last token, as drafts do here. `preset=paper` learns the text's own tokens in place of the
    target's distributions, and `preset=dpace` also has the weights of D-PACE.

    Attributes:
      anchors: blocks per row, at most.
      gamma: see above.
      dpace: see above, at most 1; 0: weights by `gamma`.
    """

    presets = {
        "paper": {"divergence": CrossEntropy("text")},
        "dpace": {"divergence": CrossEntropy("text"), "dpace": 0.5},
        "small": {"anchors": 64},
    }
    saved = ("taps", "layers", *SIZES, "block", "from_anchor", "causal")

    anchors: int = 512
    gamma: float = 4.0
    dpace: float = 0.0

    def __post_init__(self):
        name = type(self.drafter).__name__.lower()
        if self.anchors < 1 or not self.gamma > 0:
            raise ValueError(f"{name}: anchors must be at least 1 and gamma positive, got {self.anchors}, {self.gamma}")
        if not 0 <= self.dpace <= 1:
            raise ValueError(f"{name}: dpace must lie in [0, 1], got {self.dpace}; 0.5 is the published one")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        own = {"target": target_params, "draft": params}
        past = drafter.head.context(params, drafter.features(teacher.output), batch.positions)
        compare = functools.partial(self._compared, own, teacher, past)
        places = drawn_places(key, batch.due(1), self.anchors)
        told = chunked(compare, places, max(1, positions_at_a_time(batch) // drafter.drafts))
        due = told["due"]
        metrics: dict[str, Array] = {"weight": due.sum()}
        for j in range(drafter.drafts):
            metrics[of_depth("acceptance", j)] = mean(told["kept"][:, :, j], due[:, :, j])
            metrics[f"agreement_{j + 1}"] = mean(told["agreed"][:, :, j], due[:, :, j])
        return self.taken(told, mean, batch.done), metrics

    def taken(self, told: dict[str, Any], mean: Mean, done: Array | None = None) -> Array:
        """The loss of all places, from the results of `told`; `done` is the batch's."""
        weights = self.weights(told)
        loss = self.divergence.taken(told["numbers"], weights, mean, told["known"])
        return loss * mean.whole(weights, told["due"]) if self.dpace else loss

    def weights(self, told: dict[str, Any]) -> Array:
        """The weights of places `[B, A, drafts]`, from the results of `told`."""
        due = told["due"]
        if not self.dpace:
            return due * jnp.exp(-jnp.arange(due.shape[2])[None, None] / self.gamma)
        reached = jnp.cumprod((1 - self.dpace) * told["confidence"] + self.dpace, axis=2) * due
        return jnp.cumsum(reached[:, :, ::-1], axis=2)[:, :, ::-1] * due

    def _compared(self, own, teacher, past, places) -> dict[str, Any]:
        """The results of `told` for some blocks, which begin at `places` `[B, A]` where these are real; zeros elsewhere."""

        def compare(places):
            h = outputs(self.drafter, own, past, teacher.batch, places[0])
            return self.told(own, h, self._blocks(teacher, *places))

        nothing = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compare, places))
        return jax.lax.cond(places[1].any(), compare, nothing, places)

    def told(self, own, h, blocks: "Blocks") -> dict[str, Any]:
        """The values of every place `[B, A, drafts]` for the loss and the metrics, from outputs `[B, A, drafts, E]`."""
        logits, more = self.dists(own, h, blocks)
        drafted = jax.lax.stop_gradient(self.drafted(own, h, blocks, logits))
        kept, agreed = acceptance(blocks.dists, drafted, blocks.outside), agreement(blocks.dists, drafted)
        numbers = self.divergence.numbers(blocks.dists, logits, blocks.outside, blocks.labels)
        told = {
            "due": blocks.due,
            "known": blocks.known,
            "numbers": numbers,
            "kept": kept,
            "agreed": agreed * blocks.known,
        }
        if self.dpace:
            said = jnp.exp(-surprise(logits, jnp.maximum(blocks.labels, 0)))
            told["confidence"] = jax.lax.stop_gradient(jnp.where(blocks.labels >= 0, said, 0.0))
        return told | more

    def dists(self, own, h, blocks: "Blocks") -> tuple[Array, dict[str, Any]]:
        """The distributions `[B, A, drafts, U]` that the loss compares, of outputs `[B, A, drafts, E]`, and what else it
        needs for every place.
        """
        logits = self.drafter.logits(own, h.reshape(h.shape[0], -1, h.shape[-1]))
        return logits.reshape(*h.shape[:3], -1), {}

    def drafted(self, own, h, blocks: "Blocks", logits: Array) -> Array:
        """The distributions `[B, A, drafts, U]` that tokens are drafted from, given those that the loss compares."""
        return logits

    def _blocks(self, teacher, at, real) -> "Blocks":
        """The targets of blocks at `at` `[B, A]`."""
        rows, length = teacher.batch.tokens.shape
        drafts = self.drafter.drafts
        where = at[:, :, None] + jnp.arange(drafts + 1)[None, None]  # of the last token, and of the drafted tokens
        last = jnp.minimum(where, length - 1).reshape(rows, -1)
        take = lambda x: jnp.take_along_axis(x, last, axis=1).reshape(where.shape)
        before = last.reshape(where.shape)[:, :, :-1].reshape(rows, -1, 1)
        dist = teacher.dist(jax.tree.map(lambda x: jnp.take_along_axis(x, before, axis=1), teacher.grounds))
        of_block = lambda x: x.reshape(rows, -1, drafts, *x.shape[2:])
        due = take(teacher.batch.mask)[:, :, 1:] & (where[:, :, 1:] < length) & real[:, :, None]
        due &= jnp.take_along_axis(teacher.batch.seen(at), last.reshape(where.shape)[:, :, 1:], axis=2)
        due = jnp.cumprod(due, axis=2).astype(bool)
        dists, known, outside = jax.tree.map(of_block, (dist.logits, dist.known, dist.outside))
        tokens = take(teacher.batch.tokens)
        return Blocks(tokens, dists, due, known, outside, teacher.columns(tokens[:, :, 1:]))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The targets of blocks.

    Attributes:
      tokens: `[B, A, 1 + drafts]`, the text's.
      dists: `[B, A, drafts, U]`, the target's logits for all but the first.
      due: `[B, A, drafts]` bool, which of them are to be predicted.
      known: `[B, A, drafts]` bool, and `outside` `[B, A, drafts]`: see `Distribution`.
      labels: `[B, A, drafts]` int32, the columns of these tokens, -1 where the draft cannot say one.
    """

    tokens: Array
    dists: Array
    due: Array
    known: Array
    outside: Array | None
    labels: Array


def outputs(drafter, params, past: KVDelta, batch: Batch, at: Array) -> Array:
    """The outputs `[B, A, drafts, E]` of blocks in the middle of texts, all in one pass.

    Args:
      drafter: a bound DFlash.
      params: {"target": ..., "draft": ...}.
      past: the cache entries of the target's features `[B, T, ...]` (`DFlashHead.context`).
      batch: the texts.
      at: `[B, A]`, where the blocks begin: a block sees the features before that.
    """
    rows, length = batch.tokens.shape
    count, width = at.shape[1], drafter.block
    embeds = drafter.slots(params, jnp.take_along_axis(batch.tokens, at, axis=1)).reshape(rows, count * width, -1)
    begins = jnp.take_along_axis(batch.positions, at, axis=1)
    positions = (begins[:, :, None] + jnp.arange(width)[None, None]).reshape(rows, -1)
    own = jnp.repeat(jnp.arange(count), width)
    alike = jnp.broadcast_to((own[:, None] == own[None])[None], (rows, count * width, count * width))
    begin = jnp.repeat(at, width, axis=1)
    earlier = (jnp.arange(length)[None, None] < begin[:, :, None]) & batch.seen(begin)
    visible = jnp.concatenate([earlier, alike], axis=2)
    block = Block(begin, positions, jnp.zeros((rows,), jnp.int32), visible)
    h = drafter.head(params["draft"], embeds, block, None, past, jnp.repeat(begins, width, axis=1))
    return h.reshape(rows, count, width, -1)[:, :, width - drafter.drafts :]
