"""What objectives of whole draft models share."""

import dataclasses
from typing import Any

from specjax.lm import LM
from specjax.objectives.base import Objective
from specjax.sharding import shardings


@dataclasses.dataclass(frozen=True)
class OfDraft(Objective):
    """A loss of a draft model, whose parameters are those that are trained.

    Attributes:
      target: the model that it drafts for.
      draft: the draft model.
    """

    target: LM
    draft: Any

    def param_shardings(self, mesh, params):
        return shardings(mesh, self.draft.axes(params), params, self.draft.axis_counts())

    def init(self, key, target_params):
        """Random parameters of the draft."""
        return self.draft.init(key)
