"""Training of Gumiho: EAGLE-1's loss for the layers, and the same for every MLP (arXiv:2503.10135)."""

import dataclasses
import functools

import jax.numpy as jnp

from specjax.draft.eagle.objective import smooth_l1, taught
from specjax.draft.gumiho import SERIAL
from specjax.objectives.base import Recipe, check_not_negative
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, score


@dataclasses.dataclass(frozen=True)
class TrainGumiho(HeadObjective):
    """The target is frozen. Layers and MLPs learn its features and its distributions.

    MLP m has the weight `mlp_weight * decay ** (m + 1)`, and the layers 1. MLPs read the layers' own features and the
    text's own tokens; when decoding, these are drafted.

    Attributes:
      mlp_weight: see above.
      decay: see above.
      feature_weight: of the smooth L1 distance between an output and the target's feature.
      distribution_weight: of the distributions' divergence.
      noise: see TrainEagle.
    """

    recipe = Recipe(0.5)
    saved = ("layers", "mlps")

    mlp_weight: float = 1 / 9
    decay: float = 0.8
    feature_weight: float = 1.0
    distribution_weight: float = 0.1
    noise: float = 0.1

    def __post_init__(self):
        check_not_negative("gumiho", self, "mlp_weight", "decay", "feature_weight", "distribution_weight", "noise")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter, own = self.drafter, {"target": target_params, "draft": params}
        teacher, features, noisy = taught(self, target_params, batch, key)
        dist = functools.partial(drafter.logits, own)
        length = batch.tokens.shape[1]
        h, _ = drafter.read(own, noisy[:, :-1], batch.pairs(), None)  # slot t stands for feature t + 1
        embeds = drafter.embed(own, teacher.ahead(batch.tokens, 2, length - 2))
        pairs = drafter.head.joined(params, embeds, h[:, :-1])
        both = jnp.concatenate([pairs[:, :-1], pairs[:, 1:]], axis=-1)
        outputs = [(h, 1, 1.0)]
        for m in range(drafter.mlps):  # slot t stands for feature t + 3 + m
            weight = self.mlp_weight * self.decay ** (m + 1)
            outputs.append((drafter.head.guess(params, m, both), 1 + SERIAL + m, weight))
        guesses = []
        for output, steps, weight in outputs:
            told, wanted = output[:, : length - 1 - steps], features[:, steps:-1]
            besides = weight * self.feature_weight * smooth_l1(told, wanted) if self.feature_weight else None
            guesses.append(Guess(told, dist, steps, weight * self.distribution_weight, besides))
        return score(teacher, guesses, self.divergence, mean)

    def held_out(self, target_params):
        return dataclasses.replace(self, noise=0.0), target_params
