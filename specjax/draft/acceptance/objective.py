"""Training of SpecDec++'s acceptance head: how likely the target keeps a token of the draft (arXiv:2405.19715)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.draft.acceptance import Acceptance, accept_log_prob
from specjax.lm import LM, Block, Wants
from specjax.objectives.base import Batch, Objective, of_target, read
from specjax.objectives.means import MEAN, Mean

REJECT = 6.0
"""The authors' weight of a rejection; acceptance weighs 1."""


def weighted(log_accept: jax.Array, label: jax.Array, mask: jax.Array, reject: float, mean: Mean = MEAN) -> jax.Array:
    """The two-class cross-entropy with rejection weighted `reject`, over the weighted mass of labels.

    Args:
      log_accept: `[B, T]`, the head's log-probability that a token is kept.
      label: `[B, T]`, the chance that it is.
      mask: `[B, T]`.
      reject: the weight.
      mean: takes the means.
    """
    log_reject = jnp.log1p(-jnp.exp(jnp.minimum(log_accept, -1e-6)))
    mass = mean.whole(label + reject * (1 - label), mask)
    return -mean(label * log_accept + reject * (1 - label) * log_reject, mask) / jnp.maximum(mass, 1e-6)


@dataclasses.dataclass(frozen=True)
class TrainAcceptance(Objective):
    """Trains the acceptance head. Target and draft are frozen: `target_params` is the pair of their parameters.

    At every token of a text the draft draws another one after the same prefix. The label is `min(1, p/q)`, the chance
    that speculative sampling keeps the drawn token, and the head reads the draft's feature after it. The paper draws
    whole responses, so that later tokens follow drawn ones; here every drawn token follows the text, and none follows a
    rejected one.

    The loss is the two-class cross-entropy, with rejection weighted `reject`, over the weighted mass of labels.
    `acceptance` is the mean label, which does not depend on the head, and `error` is the distance of the head's chances
    from the labels.

    Attributes:
      target: the target.
      lm: the draft.
      rule: the rule whose head is trained.
      reject: weight of a rejection; acceptance weighs 1.
    """

    saved = ("layers",)

    target: LM
    lm: LM
    rule: Acceptance = Acceptance()
    reject: float = REJECT

    def __post_init__(self):
        if not self.reject > 0:
            raise ValueError(f"acceptance: reject must be positive, got {self.reject}")

    @property
    def method(self):
        return self.rule

    @property
    def reads(self):
        return Wants(final=True)

    def init(self, key, target_params):
        return self.rule.bind(self.lm).init_params(key, target_params[1])

    def merit(self, metrics):
        return -metrics["loss"]  # acceptance does not depend on the head

    def loss(self, params, target_params, batch: Batch, key, mean=MEAN):
        label, features, mask = jax.lax.stop_gradient(self._drawn(target_params, batch, key))
        log_accept = accept_log_prob(params, features)
        loss = weighted(log_accept, label, mask, self.reject, mean)
        error = mean(jnp.abs(jnp.exp(log_accept) - label), mask)
        return loss, {"acceptance": mean(label, mask), "error": error, "weight": mask.sum()}

    def _drawn(self, both, batch, key):
        """Labels `[B, T - 1]`, features `[B, T - 1, E]` after the drawn tokens, and which of them count."""
        final = of_target(self.target, both[0], batch, self.reads).final
        p = jax.nn.log_softmax(self.target.unembed(both[0], final[:, :-1]))
        taught = read(self.lm, both[1], batch, Wants(logits=True))
        q = jax.nn.log_softmax(taught.logits[:, :-1])
        keys = key if key.ndim else jax.random.split(key, len(q))
        drawn = jax.vmap(jax.random.categorical)(keys, q).astype(jnp.int32)
        pick = lambda dist: jnp.take_along_axis(dist, drawn[:, :, None], axis=2)[:, :, 0]
        label = jnp.exp(jnp.minimum(pick(p) - pick(q), 0.0))
        # a drawn token takes the place of the text's token t + 1, and sees the text before it and itself
        rows, length = batch.tokens.shape
        before = jnp.broadcast_to(jnp.arange(length - 1)[None], drawn.shape)
        text = (jnp.arange(length)[None, None] <= before[:, :, None]) & batch.seen(before)
        itself = jnp.broadcast_to(jnp.eye(length - 1, dtype=bool)[None], (rows, length - 1, length - 1))
        visible = jnp.concatenate([text, itself], axis=2)
        block = Block(drawn, batch.positions[:, :-1] + 1, jnp.zeros((rows,), jnp.int32), visible)
        features = self.lm(both[1], block, None, wants=Wants(final=True), past=taught.delta).final
        return label, features, batch.due(1)
