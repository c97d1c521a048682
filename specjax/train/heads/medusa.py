"""Training of Medusa's heads: each learns the target's law some tokens further on (arXiv:2401.10774, section 2.2)."""

import dataclasses

from specjax.draft.medusa import Medusa, head_law
from specjax.train.heads.teacher import Guess, Ids, score, teach, trimmed, with_ids
from specjax.train.losses import Divergence, ForwardKL
from specjax.train.objective import Objective


@dataclasses.dataclass(frozen=True)
class TrainMedusa(Objective):
    """Medusa-1: the target is frozen. Heads learn its laws in place of the text's tokens, weighted `decay ** j`.

    Attributes:
      drafter: bound to the target.
      ids: the draft's vocabulary; empty: the target's.
      decay: see above.
      divergence: between the laws.
    """

    drafter: Medusa
    ids: Ids = ()
    decay: float = 0.8
    divergence: Divergence = ForwardKL()

    @property
    def fields(self):
        return {"heads": self.drafter.heads, "layers": self.drafter.layers}

    def init(self, key, target_params):
        return trimmed(self.drafter, self.drafter.init_params(key, target_params), target_params, self.ids)

    def export(self, params):
        return with_ids(params, self.ids)

    def loss(self, params, target_params, batch, key):
        teacher = teach(self.drafter, target_params, batch, self.ids, self.drafter.feature_wants)
        length = batch.tokens.shape[1]
        guesses = [
            Guess(head_law(head, teacher.output.final[:, : length - j - 2]), j + 1, self.decay**j)
            for j, head in enumerate(params["heads"])
        ]
        return score(teacher, guesses, self.divergence)
