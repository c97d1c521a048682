"""P-EAGLE: EAGLE-3's head drafts every depth in one pass, from mask tokens (arXiv:2602.01469)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.eagle3 import Eagle3
from specjax.draft.feature import mask_embedding
from specjax.lm import Block


@dataclasses.dataclass(frozen=True)
class PEagle(Eagle3):
    """EAGLE-3, but slots after the last pair read a learnt feature and a mask in place of drafted tokens.

    The last pair's output drafts the first token, and the slot j places after it drafts the token j places further on.
    Drafted tokens are never read, so any tree costs one pass over as many slots as it has levels below the first.

    `params["draft"]` is Eagle3's, with `mask`: {`embedding` `[1, E]`} and `mask_feature`: {`embedding`
    `[C, target width]`}, which goes through the same norms and `fc` as the target's features.

    Attributes:
      mask: the id whose embedding the mask starts from, also for a published file that names none; -1 for the mean.
    """

    about = About(
        "peagle",
        "EAGLE-3's head for all depths at once, from mask tokens",
        "arXiv:2602.01469",
        expander="chain:length=3",
        paper="expander=chain,length=8",
        loads="head",
    )
    tiles = True
    shared = True

    mask: int = -1

    hidden = None  # pyrefly: ignore[bad-override]
    """No distribution follows from a drafted one, so no rule can read the features between them."""

    @property
    def head(self):
        head = super().head
        return dataclasses.replace(head, besides=(*head.besides, "mask", "mask_feature"))

    def init_params(self, key, target_params):
        """The feature of masks starts as zeros, and the head as EAGLE-3's."""
        start = mask_embedding(self.target, target_params, self.mask)
        feature = jnp.zeros((len(self.taps), start.shape[1]), start.dtype)
        mask = {"mask": {"embedding": start}, "mask_feature": {"embedding": feature}}
        return {**super().init_params(key, target_params), **mask}

    @classmethod
    def objective(cls):
        from specjax.draft.peagle.objective import TrainPEagle

        return TrainPEagle

    @classmethod
    def layout(cls):
        from specjax.draft.peagle.published import LAYOUT

        return LAYOUT

    def ahead(self, params, block, cache, past=None):
        """`read` for slots without a token or feature of their own: `block` says where they are, and what they see."""
        own, shape = params["draft"], block.positions.shape
        feature = self.head.fuse(own, own["mask_feature"]["embedding"].reshape(1, 1, -1))
        fill = lambda x: jnp.broadcast_to(x, (*shape, x.shape[-1]))
        embeds = own["mask"]["embedding"][None].astype(feature.dtype)
        return self.head(own, fill(embeds), fill(feature), block, cache, past)

    def propose(self, params, draft, view, sampler):
        dists = [self.logits(params, draft.feature[:, None])]
        if self.expander.depth > 1:
            positions = draft.length[:, None] + jnp.arange(self.expander.depth - 1)[None]
            h, _ = self.ahead(params, Block(jnp.zeros_like(positions), positions, draft.length), draft.cache)
            dists.append(self.logits(params, h))
        dist = jnp.concatenate(dists, axis=1)
        grow = lambda carry, level: (carry, dist[:, level.depth][:, None])
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, dist[:, 0], grow, None, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)
