"""GRIFFIN: FSPAD's two outputs, and training on tokens that a draft would reach (Hu et al. 2025, arXiv:2502.11018)."""

import dataclasses

from specjax.about import About
from specjax.draft.fspad import Fspad


@dataclasses.dataclass(frozen=True)
class Griffin(Fspad):
    """FSPAD with another input of its layer: an MLP over the normed feature and embedding, without a gate.

    `params["draft"]` is GriffinHead's, and optionally `head` and `ids`, as in EAGLE.
    """

    about = About(
        "griffin",
        "EAGLE-2 with two outputs, trained on the tokens that drafts reach",
        "arXiv:2502.11018",
        expander="top_k:k=2,depth=3,nodes=6",
        paper="expander=top_k,k=10,depth=8,nodes=60",
        loads="head",
    )
    tiles = True

    @property
    def head(self):
        from specjax.draft.griffin.network import GriffinHead

        return GriffinHead(self.config)

    @classmethod
    def objective(cls):
        from specjax.draft.griffin.objective import TrainGriffin

        return TrainGriffin

    @classmethod
    def layout(cls):
        from specjax.draft.griffin.published import LAYOUT

        return LAYOUT
