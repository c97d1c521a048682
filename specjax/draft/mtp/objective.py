"""Training of an MTP module (FastMTP, arXiv:2509.18362)."""

import dataclasses

from specjax.draft.eagle.objective import TrainEagle
from specjax.objectives.base import Recipe


@dataclasses.dataclass(frozen=True)
class TrainMTP(TrainEagle):
    """FastMTP (arXiv:2509.18362): one module for every depth, distributions alone, lower weights for later depths."""

    recipe = Recipe()
    presets = {}
    saved = ("final_norm",)

    unroll: int = 3
    decay: float = 0.6
    feature_weight: float = 0.0
    distribution_weight: float = 1.0
    noise: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        own = self.drafter.config
        if own is not None and own.num_hidden_layers > 1:
            raise ValueError("one MTP module is trained for every depth, not several: leave config out")
