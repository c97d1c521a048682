"""FSPAD: EAGLE with one output for the token and one for the next feature (Gui et al. 2024, arXiv:2408.15562)."""

import dataclasses

from specjax.about import About
from specjax.draft.eagle import Eagle


@dataclasses.dataclass(frozen=True)
class Fspad(Eagle):
    """EAGLE whose layer writes two vectors: the head reads the first, and the next pass the second.

    So the second half is trained to be the target's feature, and the first is free to be a better input of the head
    (partial alignment). The layer's input is sampled by the embedding of the known token (feature sampling).

    `params["draft"]` is FspadHead's, and optionally `head` and `ids`, as in EAGLE.
    """

    about = About(
        "fspad",
        "EAGLE-2 with separate outputs for the token and for the next feature",
        "arXiv:2408.15562",
        expander="top_k:k=2,depth=3,nodes=6",
        paper="expander=top_k,k=10,depth=8,nodes=60",
        loads="head",
    )
    tiles = True

    @property
    def feature_size(self) -> int:
        return 2 * self.config.hidden_size

    @property
    def head(self):
        from specjax.draft.fspad.network import FspadHead

        return FspadHead(self.config)

    @classmethod
    def layout(cls):
        from specjax.draft.fspad.published import LAYOUT

        return LAYOUT

    def fed(self, h):
        return h[..., self.config.hidden_size :]

    def logits(self, params, h):
        return super().logits(params, h[..., : self.config.hidden_size])
