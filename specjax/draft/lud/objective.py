"""Training of lexical units: a target learns to say at pads what it said with certainty after the text (arXiv:2405.15208)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.draft.pard.objective import TrainPard
from specjax.draft.pard2.objective import reached
from specjax.objectives.losses import surprise


@dataclasses.dataclass(frozen=True)
class TrainLud(TrainPard):
    """`TrainPard` of the target's own parameters, with only those pads that lie in a lexical unit.

    The target as it was labels the text: a unit is a maximal run of tokens each of which it gives a probability of at
    least `alpha`. A pad counts if all tokens from the one after its anchor to the one that it predicts are in one unit,
    so a unit may be continued from any of its places. Every token also counts with the next one, as without pads.

    Attributes:
      depths: the most tokens of a unit that are learned.
      alpha: see above.
    """

    starts_from_layers = True

    depths: int = 4
    alpha: float = 0.9

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"lud: alpha must lie in [0, 1], got {self.alpha}")

    def init(self, key, target_params):
        """The target's own parameters."""
        return target_params

    def numbers(self, dist, q, labels):
        said = jnp.exp(-surprise(dist, jnp.maximum(labels, 0)))
        return {**super().numbers(dist, q, labels), "sure": (said >= self.alpha).astype(jnp.float32)}

    def taken(self, told, layout, batch, due, mean):
        length = batch.tokens.shape[1]
        sure = jax.lax.stop_gradient(told["sure"])
        before = reached(layout, sure[:, :length], len(self.kept(length)))
        weights = due * jnp.where(layout.depth[None] == 0, 1.0, before * sure)
        return self.divergence.taken(told["numbers"], weights, mean), weights
