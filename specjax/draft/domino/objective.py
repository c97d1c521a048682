"""Training of Domino: DFlash's blocks, corrected along the text's own tokens. At first the uncorrected blocks are trained,
and more and more the corrected ones (arXiv:2605.29707, sgl-project/SpecForge).
"""

import dataclasses

import jax.numpy as jnp

from specjax.draft.dflash.objective import TrainDFlash
from specjax.objectives.base import check_not_negative
from specjax.objectives.losses import CrossEntropy


@dataclasses.dataclass(frozen=True)
class TrainDomino(TrainDFlash):
    """DFlash's objective for corrected logits, mixed with the same for uncorrected ones.

    The share of the second falls linearly from `base_weight` to 0 during the first `base_until` of all updates.
    Held-out text is measured without it. `preset=paper` learns the text's own tokens from 256 blocks per row, as
    SpecForge's recipes do.

    Attributes:
      gamma: see TrainDFlash.
      base_weight: see above, at most 1.
      base_until: see above, in (0, 1].
    """

    presets = {"paper": {"divergence": CrossEntropy("text"), "anchors": 256}, "small": TrainDFlash.presets["small"]}

    saved = (*TrainDFlash.saved, "state", "rank", "plain")

    gamma: float = 7.0
    base_weight: float = 1.0
    base_until: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_not_negative("domino", self, "base_weight")
        if self.base_weight > 1 or not 0 < self.base_until <= 1:
            raise ValueError(
                f"domino: base_weight and base_until are shares of at most 1, got {self.base_weight}, {self.base_until}"
            )

    def taken(self, told, mean, done=None):
        loss = super().taken(told, mean, done)
        if done is None:
            return loss
        base = self.divergence.taken(told["base"], self.weights(told), mean, told["known"])
        share = self.base_weight * jnp.maximum(1 - done[0] / self.base_until, 0.0)
        return (1 - share) * loss + share * base

    def dists(self, own, h, blocks):
        base, _ = super().dists(own, h, blocks)
        drafter, correction = self.drafter, own["draft"]["correction"]
        rows, places, drafts = h.shape[:3]
        embeds = drafter.embed(own, blocks.tokens[:, :, :drafts].reshape(rows, -1)).reshape(rows, places, drafts, -1)
        state, states = jnp.zeros((rows, places, drafter.state), h.dtype), []
        for j in range(drafts):
            state = drafter.correction.states(correction, embeds[:, :, j], state)
            states.append(state)
        late = slice(drafter.plain, None)
        made = drafter.correction(correction, h[:, :, late], jnp.stack(states, axis=2)[:, :, late])
        logits = jnp.concatenate([base[:, :, : drafter.plain], base[:, :, late] + made], axis=2)
        return logits, {"base": self.divergence.numbers(blocks.dists, base, blocks.outside, blocks.labels)}
