"""Training of DFlash and DSpark: blocks that begin at random tokens of a text (arXiv:2602.06036, deepseek-ai/DeepSpec)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.draft.feature import SIZES
from specjax.draft.heads.dspark import sureness
from specjax.lm import Block
from specjax.train.heads.teacher import HeadObjective, of_depth, teach
from specjax.train.losses import TVD, Loss, acceptance, agreement
from specjax.train.means import MEAN, Mean
from specjax.train.objective import Batch

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainDFlash(HeadObjective):
    """The target is frozen; a block is compared with the target's laws along the text. Each place in the block has a loss of
    its own, and the whole is their mean, in which later ones weigh less.

    Attributes:
      anchors: blocks a row, each at a token drawn anew for every batch.
      gamma: the j-th token of a block weighs `exp(-(j - 1) / gamma)`.
    """

    saved = ("taps", "layers", *SIZES, "block", "from_anchor", "causal")

    anchors: int = 8
    gamma: float = 4.0

    def __post_init__(self):
        if self.anchors < 1 or self.gamma <= 0:
            raise ValueError(f"dflash: anchors must be at least 1 and gamma positive, got {self.anchors}, {self.gamma}")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        at = self.drawn(key, batch.due(1))
        own = {"target": target_params, "draft": params}
        h = outputs(drafter, own, drafter.features(teacher.output), batch, at)
        blocks = self._blocks(teacher, at)
        loss, logits = self.compared(own, h, blocks, mean)
        kept, due = acceptance(blocks.laws, logits, blocks.outside), blocks.due
        metrics = {"weight": due.sum()}
        agree = agreement(blocks.laws, logits) * blocks.known
        for j in range(drafter.drafts):
            metrics[of_depth("acceptance", j)] = mean(kept[:, :, j], due[:, :, j])
            metrics[f"agreement_{j + 1}"] = mean(agree[:, :, j], due[:, :, j])
        return loss, metrics

    def drawn(self, key, due):
        """Where blocks begin, `[B, A]` int32: at tokens whose next one is to be predicted, `due` `[B, T - 1]`."""
        chances = jnp.where(due, 0.0, -jnp.inf)
        keys = key if key.ndim else jax.random.split(key, len(due))
        draw = lambda key, chances: jax.random.categorical(key, chances, shape=(self.anchors,))
        return jax.vmap(draw)(keys, chances).astype(jnp.int32)

    def compared(self, own, h, blocks: "Blocks", mean: Mean):
        """The loss of outputs `[B, A, drafts, E]`, and their laws `[B, A, drafts, U]`."""
        logits = self.drafter.logits(own, h.reshape(h.shape[0], -1, h.shape[-1])).reshape(*h.shape[:3], -1)
        return self.apart(logits, blocks, mean), logits

    def apart(self, logits, blocks, mean):
        """The divergence of the draft's laws from the target's."""
        loss, weights = jnp.zeros(()), blocks.weight[0, 0]
        for j in range(self.drafter.drafts):
            laws, q, due, known = (x[:, :, j] for x in (blocks.laws, logits, blocks.due, blocks.known))
            outside = None if blocks.outside is None else blocks.outside[:, :, j]
            loss += weights[j] * self.divergence(laws, q, due, mean=mean, known=known, outside=outside)
        return loss / weights.sum()

    def _blocks(self, teacher, at):
        """What blocks at `at` `[B, A]` should say."""
        rows, length = teacher.batch.tokens.shape
        drafts = self.drafter.drafts
        where = at[:, :, None] + jnp.arange(drafts + 1)[None, None]  # of the last token, and of those that are drafted
        last = jnp.minimum(where, length - 1).reshape(rows, -1)
        take = lambda x: jnp.take_along_axis(x, last, axis=1).reshape(where.shape)
        before = last.reshape(where.shape)[:, :, :-1].reshape(rows, -1, 1)
        law = teacher.law(jax.tree.map(lambda x: jnp.take_along_axis(x, before, axis=1), teacher.grounds))
        of_block = lambda x: x.reshape(rows, -1, drafts, *x.shape[2:])
        due = take(teacher.batch.mask)[:, :, 1:] & (where[:, :, 1:] < length)
        due &= jnp.take_along_axis(teacher.batch.seen(at), last.reshape(where.shape)[:, :, 1:], axis=2)
        weight = jnp.exp(-jnp.arange(drafts) / self.gamma)[None, None]
        laws, known, outside = jax.tree.map(of_block, (law.logits, law.known, law.outside))
        return Blocks(take(teacher.batch.tokens), laws, due, known, outside, weight)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What blocks should say.

    Attributes:
      tokens: `[B, A, 1 + drafts]`, the text's.
      laws: `[B, A, drafts, U]`, the target's logits of all but the first.
      due: `[B, A, drafts]` bool, which of them are to be predicted.
      known: `[B, A, drafts]` bool, and `outside` `[B, A, drafts]`: see `Law`.
      weight: `[1, 1, drafts]`, by their place in the block.
    """

    tokens: Array
    laws: Array
    due: Array
    known: Array
    outside: Array | None
    weight: Array


def outputs(drafter, params, features: Array, batch: Batch, at: Array) -> Array:
    """The outputs `[B, A, drafts, E]` of blocks in the middle of texts, all in one pass.

    Args:
      drafter: a bound DFlash.
      params: {"target": ..., "draft": ...}.
      features: `[B, T, ...]` of the target.
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
    past = drafter.head.context(params["draft"], features, batch.positions)
    block = Block(begin, positions, jnp.zeros((rows,), jnp.int32), visible)
    h = drafter.head(params["draft"], embeds, block, None, past)
    return h.reshape(rows, count, width, -1)[:, :, width - drafter.drafts :]


@dataclasses.dataclass(frozen=True)
class TrainDSpark(TrainDFlash):
    """As DFlash, with the text's own tokens before every slot; the confidence head learns `1 - total variation`.

    DeepSpec weighs the text's tokens 0.1, the laws' distance 0.9 in L1, which is 1.8 in total variation, and confidence 1.

    Attributes:
      divergence: between the laws.
      label_weight: of the text's own tokens, as labels.
      law_weight: of the divergence.
      confidence_weight: of the confidence head's cross-entropy.
    """

    saved = (*TrainDFlash.saved, "markov", "rank", "confidence")

    divergence: Loss = TVD()
    label_weight: float = 0.1
    law_weight: float = 1.8
    confidence_weight: float = 1.0

    def compared(self, own, h, blocks, mean):
        laws, sure = self._slots(own, h, blocks)
        loss = self.law_weight * self.apart(laws, blocks, mean)
        weight = blocks.weight * blocks.due
        if self.label_weight:
            columns = blocks.tokens[:, :, 1:]
            if self.ids:  # a text's token that the draft cannot say teaches nothing
                ids = jnp.asarray(self.ids)
                columns = jnp.searchsorted(ids, columns).clip(0, len(self.ids) - 1)
                sayable = ids[columns] == blocks.tokens[:, :, 1:]
            else:
                sayable = True
            said = jnp.take_along_axis(jax.nn.log_softmax(laws, axis=-1), columns[..., None], axis=-1)[..., 0]
            loss -= self.label_weight * mean(said, weight * sayable)
        if sure is not None:
            right = jax.lax.stop_gradient(acceptance(blocks.laws, laws, blocks.outside))
            said = right * jax.nn.log_sigmoid(sure) + (1 - right) * jax.nn.log_sigmoid(-sure)
            loss -= self.confidence_weight * mean(said, weight)
        return loss, laws

    def _slots(self, own, h, blocks):
        """Laws `[B, A, drafts, U]` and confidence logits `[B, A, drafts]` along the text's tokens."""
        drafter, markov = self.drafter, own["draft"]["markov"]
        state, laws, sure = jnp.zeros((*h.shape[:2], drafter.rank), h.dtype), [], []
        for j in range(drafter.drafts):
            before = drafter.bias.before(markov, blocks.tokens[:, :, j])
            bias, state = drafter.bias(markov, before, h[:, :, j], state)
            laws.append(drafter.logits(own, h[:, :, j]) + bias)
            if drafter.confidence:
                sure.append(sureness(own["draft"]["confidence"], h[:, :, j], before))
        return jnp.stack(laws, axis=2), jnp.stack(sure, axis=2) if sure else None
