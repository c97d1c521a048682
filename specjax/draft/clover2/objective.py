"""Training of Clover-2: its chain of heads over the text's own tokens (arXiv:2408.00264, section 3.4)."""

import dataclasses

from specjax.draft.clover.objective import chained
from specjax.objectives.base import check_not_negative
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import HeadObjective, score, teach


@dataclasses.dataclass(frozen=True)
class TrainClover2(HeadObjective):
    """The target is frozen; head i learns its distribution i tokens further on, weighted `decay ** i`.

    Only distributions are fitted; the paper's regression of states to the target's features is left out, as in EAGLE-3.

    Attributes:
      heads: how many tokens are drafted in training.
      decay: see above.
    """

    saved = ("layers", "published")
    starts_from_layers = True

    heads: int = 4
    decay: float = 0.7

    def __post_init__(self):
        if self.heads < 1:
            raise ValueError(f"clover2: heads must be at least 1, got {self.heads}")
        check_not_negative("clover2", self, "decay")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        own = {"target": target_params, "draft": params}
        return score(teacher, chained(drafter, own, teacher, self.heads, self.decay), self.divergence, mean)
