"""JetSpec: DFlash's block, in which no slot sees a later one, as a tree (arXiv:2606.18394)."""

import dataclasses

from specjax.about import About
from specjax.draft.dflash import DFlash
from specjax.expand import BestFirst, Expander


@dataclasses.dataclass(frozen=True)
class JetSpec(DFlash):
    """DFlash whose slots see no later one, in any layer, and a tree of its distributions, see `BestFirst`.

    In training, a block's places weigh alike: see TrainJetSpec.

    Attributes:
      expander: see DFlash.
      causal: always true; with false it would be a DFlash.
    """

    about = About(
        "jetspec",
        "DFlash's block, whose slots see no later one, as a tree",
        "arXiv:2606.18394",
        expander="best_first:k=3,depth=3,nodes=12",
        paper="expander=best_first,k=7,depth=15,nodes=128",
        loads="head",
    )
    tiles = True

    expander: Expander = BestFirst(3, 3, 12)
    causal: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not self.causal:
            raise ValueError(
                "jetspec: no slot sees a later one, so causal must be true: choose dflash for the other kind"
            )

    @classmethod
    def objective(cls):
        from specjax.draft.jetspec.objective import TrainJetSpec

        return TrainJetSpec

    @classmethod
    def layout(cls):
        from specjax.draft.jetspec.published import LAYOUT

        return LAYOUT
