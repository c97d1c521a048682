"""Training of judge decoding's head on labelled tokens (Bachmann et al. 2025, arXiv:2501.19309)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import Wants
from specjax.objectives.base import Objective, check_not_negative, of_target
from specjax.objectives.means import MEAN
from specjax.verify.judge.head import score


@dataclasses.dataclass(frozen=True)
class TrainJudge(Objective):
    """The target is frozen; the head learns from its features at labelled tokens which of them are right.

    All tokens of a right answer are right. Those of a wrong one are right up to its first wrong token; after the wrong
    tokens nothing is labelled. The loss is the weighted cross-entropy of the two labels: wrong tokens, which are few,
    have the share `wrong` of it. `kept_right` and `kept_wrong` are the shares of both that pass at a threshold of 0.5.

    Attributes:
      verifier: a `Judge`, bound to its target.
      wrong: the share of the loss that wrong tokens have, in (0, 1).
      decay: weight of the kernel's square.
    """

    lines = "labelled"

    verifier: Any
    wrong: float = 0.5
    decay: float = 1e-2

    def __post_init__(self):
        check_not_negative("judge", self, "decay")
        if not 0 < self.wrong < 1:
            raise ValueError(f"judge: wrong must be in (0, 1), got {self.wrong}")

    def init(self, key, target_params):
        return jax.tree.map(jnp.zeros_like, self.verifier.init_params(key, target_params))

    def loss(self, params, target_params, batch, key, mean=MEAN):
        features = of_target(self.verifier.target, target_params, batch, Wants(final=True)).final
        logits = score(params, features)
        right, wrong = batch.mask & ~batch.wrong, batch.mask & batch.wrong
        shares = (
            (right, -jax.nn.log_sigmoid(logits), 1 - self.wrong),
            (wrong, -jax.nn.log_sigmoid(-logits), self.wrong),
        )
        loss = sum(share * mean(each, mask) for mask, each, share in shares)
        square = jnp.sum(params["kernel"].astype(jnp.float32) ** 2)
        loss += self.decay * square * mean(jnp.ones(logits.shape), batch.mask)
        kept = (logits > 0).astype(jnp.float32)
        metrics = {"kept_right": mean(kept, right), "kept_wrong": mean(kept, wrong), "weight": batch.mask.sum()}
        return loss, metrics
