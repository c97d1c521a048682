"""Training of drafters: objectives and losses here, the loop in `loop`, data in `data`, the command in `command`."""

from specjax.train.losses import LOSSES, Loss
from specjax.train.objective import Batch, Objective

__all__ = ["LOSSES", "Batch", "Loss", "Objective"]
