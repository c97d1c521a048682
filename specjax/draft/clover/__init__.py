"""Clover: Medusa's heads joined by the tokens that were drafted before (Xiao et al. 2024, arXiv:2405.00263)."""

import dataclasses
from typing import Any

from specjax.about import About
from specjax.draft.clover.regressive import RegressiveDrafter
from specjax.draft.medusa import settle_tree


@dataclasses.dataclass(frozen=True)
class Clover(RegressiveDrafter):
    """Medusa's heads with three additions, which tell a head of the tokens before the one that it guesses.

    - Augmenting block: a decoder layer over the target's features alone, with a cache.
    - Attention decoder: it mixes the embedding of the last known token into a state, as one attended place.
    - Regressive connection: the next head's state is made of the state of the head before and of the token drafted from it.

    A head is a residual block over its state, a norm and the target's own head. `params["draft"]` is CloverHead's, and
    optionally `head` and `ids`, as in EAGLE.

    The paper's code was never published and only its abstract could be read. The attention decoder is that of
    Clover-2's code, which says that it is Clover's; the order of the parts is what Clover-2's paper says it changed.

    Attributes:
      expander: turns the heads' distributions into a tree, no deeper than there are heads. None for a small static
        tree.
      heads: how many.
    """

    about = About(
        "clover",
        "Medusa's heads over a state that takes in every drafted token",
        "arXiv:2405.00263",
        expander="static:tree=2 | 1",
        paper="expander=eagle2,k=4,depth=3,nodes=5",
        loads="head",
    )
    tiles = True

    expander: Any = None
    heads: int = 3

    def __post_init__(self):
        settle_tree(self, self.heads)
        super().__post_init__()

    @property
    def head(self):
        from specjax.draft.clover.network import CloverHead

        return CloverHead(self.cache_config, self.heads)

    @classmethod
    def objective(cls):
        from specjax.draft.clover.objective import TrainClover

        return TrainClover

    def output(self, own, h, embeds, depth):
        return self.head.outputs(own, h, depth)
