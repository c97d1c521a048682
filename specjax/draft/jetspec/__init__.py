"""JetSpec: DFlash's block, in which no slot sees a later one, as a tree (arXiv:2606.18394)."""

import dataclasses

from specjax.about import About
from specjax.draft.dflash import DFlash
from specjax.expand import BestFirst, Expander


@dataclasses.dataclass(frozen=True)
class JetSpec(DFlash):
    """DFlash with one flag, `causal`, and a tree of its distributions: see `BestFirst`. Its training is DFlash's."""

    about = About(
        "jetspec",
        "DFlash's block, whose slots see no later one, as a tree",
        "arXiv:2606.18394",
        expander="best_first:k=3,depth=3,nodes=12",
        paper="expander=best_first,k=7,depth=15,nodes=128",
        loads="head",
    )

    expander: Expander = BestFirst(3, 3, 12, coupled=False)
    causal: bool = True

    @classmethod
    def layout(cls):
        from specjax.draft.jetspec.published import LAYOUT

        return LAYOUT
