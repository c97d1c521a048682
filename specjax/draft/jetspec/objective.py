"""Training of JetSpec: DFlash's blocks, all places of which weigh alike (arXiv:2606.18394)."""

import dataclasses
import math

from specjax.draft.dflash.objective import TrainDFlash


@dataclasses.dataclass(frozen=True)
class TrainJetSpec(TrainDFlash):
    """DFlash's objective without its decay: a forward KL from the target's distributions, as in the paper.

    The authors' training code is not published. NVIDIA's NeMo AutoModel reads the paper in the same way, with a
    temperature of 1 by default, which is the only one here.

    Attributes:
      gamma: see TrainDFlash; infinite for equal weights.
    """

    presets = {"small": TrainDFlash.presets["small"]}

    gamma: float = math.inf
