"""Domino: DFlash's block, corrected slot by slot by a recurrent network over the drafted tokens (arXiv:2605.29707)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.dflash import DFlash
from specjax.draft.domino.network import Correction
from specjax.draft.head import params_dtype
from specjax.expand import Chain, Expander


@dataclasses.dataclass(frozen=True)
class Domino(DFlash):
    """DFlash, but a slot's logits are corrected by what the tokens drafted before it are, so that they depend on the
    node's path.

    The layers run once for a block, the recurrent network once for a level. `params["draft"]` is DFlash's with
    `correction`, see Correction.

    Attributes:
      from_anchor: see DFlash.
      state: the width of the network's state.
      rank: of the correction.
      plain: how many of the first drafted tokens are not corrected.
    """

    about = About(
        "domino",
        "DFlash with a correction by a recurrent network over the drafted tokens",
        "arXiv:2605.29707",
        expander="chain:length=3",
        paper="expander=chain,length=15",
        loads="head",
    )
    shared = False

    expander: Expander = Chain(3)
    from_anchor: bool = True
    state: int = 64
    rank: int = 32
    plain: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.state < 1 or self.rank < 1 or self.plain < 0:
            raise ValueError(
                f"domino: state and rank must be at least 1 and plain not negative, got {self.state}, {self.rank}, {self.plain}"
            )

    def bind(self, target):
        bound = super().bind(target)
        if self.plain >= bound.drafts:
            raise ValueError(
                f"domino: a block of {self.block} drafts {bound.drafts} tokens, and plain={self.plain} leaves none of them "
                "to be corrected: choose fewer"
            )
        return bound

    @property
    def correction(self) -> Correction:
        """The module of the correction, as functions."""
        return Correction(self.config.hidden_size, self.state, self.rank)

    def init_params(self, key, target_params):
        """DFlash's parameters, and a correction of zero."""
        params = super().init_params(key, target_params)
        made = self.correction.init(jax.random.fold_in(key, 1), self.target.vocab_size, params_dtype(params["fc"]))
        return {**params, "correction": made}

    @classmethod
    def objective(cls):
        from specjax.draft.domino.objective import TrainDomino

        return TrainDomino

    @classmethod
    def layout(cls):
        from specjax.draft.domino.published import LAYOUT

        return LAYOUT

    def trimmed(self, params, target_params, ids):
        drafter, own = super().trimmed(params, target_params, ids)
        head = {"kernel": params["correction"]["head"]["kernel"][:, ids]}
        return drafter, {**own, "correction": {**params["correction"], "head": head}}

    def widened(self, params, k, width):
        from specjax.draft.domino.widening import beside_states

        return beside_states(params, k, width)

    def propose(self, params, draft, view, sampler):
        h = self.outputs(params, draft, view)[:, : self.expander.depth]
        base, own = self.logits(params, h), params["draft"]["correction"]

        def dist(depth, tokens, above):
            states = self.correction.states(own, self.embed(params, tokens), above)
            if depth < self.plain:
                return base[:, depth][:, None], states
            slot = jnp.broadcast_to(h[:, depth][:, None], (*tokens.shape, h.shape[-1]))
            return base[:, depth][:, None] + self.correction(own, slot, states), states

        def grow(states, level):  # after the root and after every scored node, [B, 1 + P, G]
            above = jnp.take_along_axis(states, level.parent[:, :, None] + 1, axis=1)
            dists, more = dist(level.depth, level.tokens, above)
            return jnp.concatenate([states, more], axis=1), dists

        begin = jnp.zeros((*view.root.shape, 1, self.state), params_dtype(own))
        first, states = dist(0, view.root[:, None], begin)
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, first[:, 0], grow, states, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)
