"""Training of EAGLE-3: unrolled, from the distributions alone (arXiv:2503.01840)."""

import dataclasses

from specjax.draft.eagle.objective import TrainEagle
from specjax.draft.feature import SIZES
from specjax.objectives.base import Recipe


@dataclasses.dataclass(frozen=True)
class TrainEagle3(TrainEagle):
    """EAGLE-3's objective: distributions alone, unrolled seven times as its authors do.

    A pass's loss is the mean over the positions that count in it. SpecForge divides by all slots of a batch, so padding
    and tokens that the draft cannot say make its loss, and its step, smaller.
    """

    saved = ("taps", "layers", *SIZES, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

    recipe = Recipe(0.5)
    presets = {}

    unroll: int = 7
    feature_weight: float = 0.0
    distribution_weight: float = 1.0
    noise: float = 0.0
