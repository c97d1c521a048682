"""Training objectives: their contract, losses between distributions, and what objectives share."""

from specjax.objectives.base import Batch, Objective
from specjax.objectives.losses import LOSSES, Loss

__all__ = ["LOSSES", "Batch", "Loss", "Objective"]
