"""Clover-2: recurrent heads joined by regressive attention (Xiao et al. 2024, arXiv:2408.00264)."""

import dataclasses

from specjax.about import About
from specjax.draft.clover.regressive import RegressiveDrafter
from specjax.draft.head import head_kernel


@dataclasses.dataclass(frozen=True)
class Clover2(RegressiveDrafter):
    """Two decoder layers over (feature, next token) make a state; every drafted token is mixed into it without attention.

    It reads the target's last layer before the final norm. `params["draft"]` is CloverHead's. It optionally holds
    `head`: {`kernel` `[E, U]`} and `ids` `[U]` for fewer draft tokens, and `embed`: {`embedding` `[V, E]`} if the
    embedding is not the target's.

    Attributes:
      published: whether the network is the authors' (XiaoBin1992/clover): augmenting blocks `W h + b` and
        `W [h; e] + b`, and tokens embedded by the rows of the target's head, which are not trained. Otherwise, as in a
        small head trained here, they are `h + silu(W h + b)` and `h + silu(W [h; e] + b)`, with the target's own
        embedding.
    """

    about = About(
        "clover2",
        "recurrent heads with attention to the last token",
        "arXiv:2408.00264",
        expander="chain:length=3",
        paper="expander=static,tree=4 | 3 2x2 1 | 3 2x2 1 | 3 | 2",
        fields=("layers",),
        loads="head",
    )
    tiles = True

    layers: int = 2
    published: bool = False

    @property
    def head(self):
        from specjax.draft.clover2.network import CloverHead

        return CloverHead(self.cache_config, self.published)

    def init_params(self, key, target_params):
        params = super().init_params(key, target_params)
        params["norm"] = params["head_norm"]
        if self.published:
            params["embed"] = {"embedding": head_kernel(self.target, target_params).T}
        return params

    @classmethod
    def objective(cls):
        from specjax.draft.clover2.objective import TrainClover2

        return TrainClover2

    @classmethod
    def layout(cls):
        from specjax.draft.clover2.published import LAYOUT

        return LAYOUT

    def output(self, own, h, embeds, depth):
        return self.head.outputs(own, h, embeds)
