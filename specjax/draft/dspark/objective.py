"""Training of DSpark: DFlash's blocks, biases along the text's own tokens, and the draft's confidence
(deepseek-ai/DeepSpec).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.dflash.objective import TrainDFlash
from specjax.draft.dspark.network import sureness
from specjax.objectives.base import check_not_negative
from specjax.objectives.losses import TVD, CrossEntropy, Loss, acceptance


@dataclasses.dataclass(frozen=True)
class TrainDSpark(TrainDFlash):
    """DFlash's objective, with the text's own tokens before every slot; the confidence head learns `1 - total variation`.

    In DeepSpec the weights are 0.1 for the text's tokens, 0.9 for the distributions' L1 distance (1.8 in total
    variation), and 1 for confidence.

    Attributes:
      divergence: between the distributions.
      label_weight: of the text's own tokens, as labels.
      distribution_weight: of the divergence.
      confidence_weight: of the confidence head's cross-entropy.
    """

    presets = {"small": TrainDFlash.presets["small"]}
    saved = (*TrainDFlash.saved, "markov", "rank", "confidence")

    divergence: Loss = TVD()
    label_weight: float = 0.1
    distribution_weight: float = 1.8
    confidence_weight: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_not_negative("dspark", self, "label_weight", "distribution_weight", "confidence_weight")

    def taken(self, told, mean, done=None):
        loss, weight = self.distribution_weight * super().taken(told, mean, done), self.weights(told)
        if self.label_weight:
            loss += self.label_weight * CrossEntropy("text").taken(told["said"], weight, mean)
        if "sure" in told:
            loss += self.confidence_weight * mean(told["sure"], weight)
        return loss

    def dists(self, own, h, blocks):
        logits, sure = self._slots(own, h, blocks)
        more: dict[str, Any] = {"said": CrossEntropy("text").numbers(blocks.dists, logits, None, blocks.labels)}
        if sure is not None:
            right = jax.lax.stop_gradient(acceptance(blocks.dists, logits, blocks.outside))
            more["sure"] = -(right * jax.nn.log_sigmoid(sure) + (1 - right) * jax.nn.log_sigmoid(-sure))
        return logits, more

    def _slots(self, own, h, blocks):
        """Distributions `[B, A, drafts, U]` and confidence logits `[B, A, drafts]` along the text's tokens."""
        drafter, markov = self.drafter, own["draft"]["markov"]
        state, dists, sure = jnp.zeros((*h.shape[:2], drafter.rank), h.dtype), [], []
        for j in range(drafter.drafts):
            before = drafter.bias.before(markov, blocks.tokens[:, :, j])
            bias, state = drafter.bias(markov, before, h[:, :, j], state)
            dists.append(drafter.logits(own, h[:, :, j]) + bias)
            if drafter.confidence:
                sure.append(sureness(own["draft"]["confidence"], h[:, :, j], before))
        return jnp.stack(dists, axis=2), jnp.stack(sure, axis=2) if sure else None
