"""Clover: Medusa's heads joined by the tokens that were drafted before (Xiao et al. 2024, arXiv:2405.00263)."""

import dataclasses

from specjax.about import About
from specjax.draft.clover.regressive import RegressiveDrafter
from specjax.expand import Expander, Static


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
      heads: how many; a tree is no deeper.
    """

    about = About(
        "clover",
        "Medusa's heads over a state that takes in every drafted token",
        "arXiv:2405.00263",
        expander="static:tree=2 | 1 | 1",
        paper="expander=eagle2,k=4,depth=3,nodes=5",
        fields=("layers",),
        loads="head",
    )
    tiles = True

    expander: Expander = Static(((0,), (1,), (0, 0), (0, 0, 0)))
    heads: int = 3

    def __post_init__(self):
        super().__post_init__()
        if self.heads < 1:
            raise ValueError(f"clover: heads must be at least 1, got heads={self.heads}")
        if self.expander.depth > self.heads:
            raise ValueError(
                f"clover: a tree of depth {self.expander.depth} needs as many heads, there are {self.heads}"
            )

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
