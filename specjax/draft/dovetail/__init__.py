"""Dovetail's draft head: EAGLE-2's with a gated fusion and more layers (Zhang et al. 2024, arXiv:2412.18934).

Its authors verify on the host's processor, where every node costs. So the tree is small, and the head is deep.
"""

import dataclasses
from typing import Any

from specjax.about import About
from specjax.draft.eagle import Eagle
from specjax.draft.feature import layers_config


@dataclasses.dataclass(frozen=True)
class Dovetail(Eagle):
    """EAGLE whose first layer reads a gated sum of feature and embedding (dynamic gating fusion), with layers after it.

    `params["draft"]` is DovetailHead's, and optionally `head` and `ids`, as in EAGLE.

    Attributes:
      layers: decoder layers, if `config` does not say it; the authors measure with 5.
    """

    about = About(
        "dovetail",
        "EAGLE-2 with a gated sum of feature and embedding, and more layers",
        "arXiv:2412.18934",
        expander="top_k:k=2,depth=3,nodes=6",
        paper="expander=top_k,k=10,depth=8,nodes=16",
        loads="head",
    )
    tiles = True

    layers: int = 5

    def __post_init__(self):
        super().__post_init__()
        if self.layers < 1:
            raise ValueError(f"dovetail: layers must be at least 1, got layers={self.layers}")

    @property
    def head(self) -> Any:
        from specjax.draft.dovetail.network import DovetailHead

        return DovetailHead(self.config)

    def bind(self, target):
        own = self.config or layers_config(target, "dovetail", self.layers)
        return dataclasses.replace(super().bind(target), config=own, layers=own.num_hidden_layers)

    @classmethod
    def objective(cls):
        from specjax.draft.dovetail.objective import TrainDovetail

        return TrainDovetail

    @classmethod
    def layout(cls):
        from specjax.draft.dovetail.published import LAYOUT

        return LAYOUT
