"""Training of Medusa's heads: each learns the target's distribution some tokens further on (arXiv:2401.10774, section 2.2)."""

import dataclasses
import functools

from specjax.draft.medusa import head_logits
from specjax.objectives.base import check_not_negative
from specjax.objectives.losses import CrossEntropy
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, score, teach


@dataclasses.dataclass(frozen=True)
class TrainMedusa(HeadObjective):
    """Medusa-1: the target is frozen, and heads learn its distributions, weighted `decay ** j`.

    With `preset=paper` they learn the text's own tokens, all weighted alike, as Medusa's authors do. The heads' losses,
    each a mean, are summed.

    Attributes:
      decay: see above.
    """

    presets = {"paper": {"divergence": CrossEntropy("text"), "decay": 1.0}}
    saved = ("heads", "layers", "own_head")

    decay: float = 0.8

    def __post_init__(self):
        check_not_negative("medusa", self, "decay")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        teacher = teach(self.drafter, target_params, batch, self.ids, self.drafter.feature_wants)
        final, length = teacher.output.final, batch.tokens.shape[1]
        kernel = self.drafter.shared_kernel(target_params, self.columns)
        guesses = [
            Guess(final[:, : length - j - 2], functools.partial(head_logits, head, kernel=kernel), j + 1, self.decay**j)
            for j, head in enumerate(params["heads"])
        ]
        return score(teacher, guesses, self.divergence, mean)
