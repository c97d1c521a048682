"""Training of Hydra's heads: as for Medusa's, with the text's own tokens as the drafted ones (arXiv:2402.05109, section 3)."""

import dataclasses
import functools

import jax.numpy as jnp

from specjax.draft.hydra import head_logits
from specjax.objectives.base import Recipe, check_not_negative
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, score, teach


@dataclasses.dataclass(frozen=True)
class TrainHydra(HeadObjective):
    """The target is frozen; heads and the prefix layer learn its distributions, weighted `decay ** i`.

    The default weighs all heads alike, as Hydra's authors do.

    Attributes:
      decay: see above.
    """

    recipe = Recipe(weight_decay=0.1)
    saved = ("heads", "layers", "own_head", "prefix_layer")

    decay: float = 1.0

    def __post_init__(self):
        check_not_negative("hydra", self, "decay")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        length = batch.tokens.shape[1]
        own = {"target": target_params, "draft": params}
        prefix, _ = drafter.read(own, teacher.output.final, batch.block(), None)
        embeds = drafter.target.embed(target_params, batch.tokens)
        kernel, guesses = drafter.shared_kernel(target_params, self.columns), []
        for i, head in enumerate(params["heads"]):
            width = length - i - 2
            seen = [teacher.ahead(embeds, j, width) for j in range(1, i + 2)]
            inputs = jnp.concatenate([prefix[:, :width], *seen], axis=-1)
            dist = functools.partial(head_logits, head, kernel=kernel)
            guesses.append(Guess(inputs, dist, i + 1, self.decay**i))
        return score(teacher, guesses, self.divergence, mean)
