"""Generalized aggressive decoding: a decoder that sees both ways drafts a block of masks at once (Xia et al. 2022,
arXiv:2203.16487).
"""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter
from specjax.draft.model import ModelDraft
from specjax.draft.one_pass import OnePass
from specjax.expand import Chain, Expander

LENGTH = 25
"""The authors' block of masks."""
LIMIT = 200
"""The most tokens of a text in the authors' programs (`max_len` in hemingkx/GAD `inference.py`)."""


@dataclasses.dataclass(frozen=True)
class Gad(TreeDrafter, OnePass):
    """Drafts with `params["draft"]`, a non-autoregressive model whose decoder sees both ways.

    It has its own encoder, as its target has, which reads the source once. In a step its decoder reads the text and D
    masks after it, for a tree of D levels. All of them see each other, and mask i drafts level i. No distribution
    depends on drafted tokens, so any tree costs one pass.

    As published, every step reads the whole text again. Here it reads the last `recent` tokens before the new ones
    again, and has older ones in a cache, as the last pass that read them left them. A text of at most `recent` tokens
    has the published drafts.

    Two points are this library's. The mask is never drafted; the authors' is a token that may be. The model reads the
    decoder's start tokens before the text, as its target does.

    Attributes:
      lm: the model, of the target's vocabulary.
      mask_id: the token that is read as a mask.
      expander: turns the distributions into a tree. The default is the authors' chain.
      recent: how many tokens before the new ones a step reads again, at least 0.
    """

    about = About(
        "gad",
        "a model with an encoder that drafts a block of masks in one pass, from both sides",
        "arXiv:2203.16487",
        fields=("recent",),
        expander=f"chain:length={LENGTH}",
        paper=f"recent={LIMIT}",
        loads="block_draft",
    )
    tiles = True
    shared = True

    expander: Expander = Chain(LENGTH)
    recent: int = 32

    called = "non-autoregressive model"
    shift = False

    def __post_init__(self):
        super().__post_init__()
        if self.recent < 0:
            raise ValueError(f"gad needs recent >= 0, got {self.recent}")

    @property
    def candidates(self) -> int:
        return self.expander.width

    def init(self, params, batch, capacity):
        return ModelDraft(*self.fresh(params, batch, capacity))

    def axes(self, draft):
        return ModelDraft(self.lm.cache_axes(draft.cache), ("batch",))

    def param_shardings(self, mesh, params):
        return self.model_shardings(mesh, params)

    def propose(self, params, draft, view, sampler):
        masks = jnp.ones((view.root.shape[0], self.depth), bool)
        cache, dists = self.read(params, draft, view, masks)
        grow = lambda carry, level: (carry, dists[:, level.depth][:, None])
        tree = self.expander(view.root, dists[:, 0], grow, None, sampler, keep_q=view.keep_q)
        return Proposal(tree, ModelDraft(cache, view.length))
