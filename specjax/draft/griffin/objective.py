"""Training of GRIFFIN (Hu et al. 2025, arXiv:2502.11018)."""

import dataclasses

from specjax.draft.eagle.objective import HASS, TrainEagle
from specjax.objectives.losses import ForwardKL


@dataclasses.dataclass(frozen=True)
class TrainGriffin(TrainEagle):
    """GRIFFIN's first stage is EAGLE's training. Its second one (`preset=stage2`) is HASS's in two passes.

    There the ten likeliest tokens weigh half as much as in HASS besides, and the second pass counts only where the text's
    token was among the first one's three likeliest.
    """

    presets = {"stage2": {**HASS, "unroll": 2, "divergence": ForwardKL(10, 5.0), "aligned": 3}}
