"""Training of P-EAGLE (arXiv:2602.01469)."""

import dataclasses

from specjax.draft.eagle3.objective import TrainEagle3
from specjax.objectives.base import Recipe


@dataclasses.dataclass(frozen=True)
class TrainPEagle(TrainEagle3):
    """P-EAGLE: pass s > 0 reads masks. All depths of every chain are kept; the paper keeps a share of the deeper ones.

    Attributes:
      unroll: depths.
      decay: of their weights; the paper has none.
    """

    recipe = Recipe()

    unroll: int = 4
    decay: float = 1.0

    def later(self, own, h, block, past):
        return self.drafter.ahead(own, block, None, past)
