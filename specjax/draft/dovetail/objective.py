"""Training of Dovetail (Zhang et al. 2024, arXiv:2412.18934)."""

import dataclasses

from specjax.draft.eagle.objective import TrainEagle


@dataclasses.dataclass(frozen=True)
class TrainDovetail(TrainEagle):
    """EAGLE-1's training, with its losses, noise and clipping, as in the authors' script."""

    saved = ("layers",)
