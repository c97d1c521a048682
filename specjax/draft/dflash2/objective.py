"""Training of DFlash 2: DFlash's blocks, and the selector along the text's own tokens (sgl-project/SpecForge)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.draft.dflash.objective import TrainDFlash
from specjax.draft.dflash2.selector import spread
from specjax.objectives.base import check_not_negative
from specjax.objectives.losses import CrossEntropy


@dataclasses.dataclass(frozen=True)
class TrainDFlash2(TrainDFlash):
    """DFlash's objective for the logits of all tokens, plus the selector's cross-entropy of the text's own token.

    The selector is taught at places where that token is among the candidates, and given the text's token before. Both
    losses have the same weights; other places count 0 for the selector. Its gradient also reaches the layers.

    The selector's weight is 0 during the first `selector_from` of all updates, and grows linearly during the next
    `selector_ramp` of them. Held-out text is measured with all of it. Acceptance is that of the selector's distribution.

    Attributes:
      gamma: see TrainDFlash.
      selector_weight: see above.
      selector_from: see above, in [0, 1].
      selector_ramp: see above, in [0, 1].
    """

    presets = {"paper": {"divergence": CrossEntropy("text")}, "small": TrainDFlash.presets["small"]}
    saved = (
        *TrainDFlash.saved, "reach", "group", "rank", "candidates", "input_scale", "multiplier", "soft_cap",
    )  # fmt: skip

    selector_weight: float = 1.0
    selector_from: float = 0.0005
    selector_ramp: float = 0.0005

    def __post_init__(self):
        super().__post_init__()
        check_not_negative("dflash2", self, "selector_weight", "selector_from", "selector_ramp")
        if self.selector_from > 1 or self.selector_ramp > 1:
            raise ValueError(
                "dflash2: selector_from and selector_ramp are shares of at most 1, got "
                f"{self.selector_from}, {self.selector_ramp}"
            )

    def taken(self, told, mean, done=None):
        weight = self.selector_weight * (1.0 if done is None else self._share(done[0]))
        return super().taken(told, mean, done) + weight * mean(told["chosen"], self.weights(told))

    def _share(self, done):
        """The share of its weight that the selector has when `done` of all updates were made."""
        after = done - self.selector_from
        return (
            jnp.clip(after / self.selector_ramp, 0.0, 1.0) if self.selector_ramp else (after >= 0).astype(jnp.float32)
        )

    def dists(self, own, h, blocks):
        logits, _ = super().dists(own, h, blocks)
        scores, columns = self._scores(own, h, blocks, logits)
        said = columns == blocks.labels[..., None]
        surprise = jax.nn.logsumexp(scores, axis=-1) - jnp.where(said, scores, 0.0).sum(axis=-1)
        return logits, {"chosen": jnp.where(said.any(axis=-1), surprise, 0.0)}

    def drafted(self, own, h, blocks, logits):
        scores, columns = self._scores(own, h, blocks, logits)
        return spread(scores[..., None, :], columns, logits.shape[-1])[..., 0, :]

    def _scores(self, own, h, blocks, logits):
        """The selector's scores of every place's candidates, and their columns, `[B, A, drafts, k]`."""
        selector = self.drafter.selector
        likeliest = selector.likeliest(logits)
        before = blocks.tokens[:, :, : h.shape[2], None]
        return selector(own["draft"]["selector"], h, before, likeliest)[..., 0, :], likeliest[1]
