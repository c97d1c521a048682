"""Saguaro: the draft model prepares a block for every likely verdict while the target judges (arXiv:2603.03251)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About, abouts
from specjax.draft.ahead import Ahead
from specjax.draft.model import ModelDraft, ModelDrafter
from specjax.expand import Chain


@dataclasses.dataclass(frozen=True)
class Saguaro(Ahead):
    """Speculates on the verdict: after each of the block's tokens, and before the first, it guesses `fan` tokens with which
    the target may go on, and writes a whole block after each guess.

    All branches are written together, one pass for each token. So a step's passes read `(length + 1) fan` tokens each.
    Where a block's token is accepted it is no correction, and no guess. If the verdict is one of these branches, the next
    block is there at once. Otherwise it is drafted before the target's pass, as by `draft`. The authors do so too with
    their setting `jit_speculate`. Without it theirs accepts a token by equality after such a miss, which is not the
    target's distribution.

    Their `sampler_x`, off by default, is not here. It draws drafts from a changed distribution to make branches likelier.

    Attributes:
      length: the tokens of a block.
      fan: the guesses after each token.
    """

    about = About(
        "saguaro",
        "a small model that writes a block for every likely verdict while the target judges",
        "arXiv:2603.03251",
        fields=("length", "fan"),
        defaults={"length": 4, "fan": 2},
        loads="model",
        paper="length=7,fan=3",
    )
    tiles = True

    length: int = 7
    fan: int = 3

    def __post_init__(self):
        if self.length < 1 or self.fan < 1:
            raise ValueError(
                f"{abouts(type(self))[0].name} needs length and fan of at least 1, got length={self.length}, fan={self.fan}"
            )

    @property
    def block(self):
        return self.length

    @property
    def guessed(self):
        return self.fan

    def points(self, count):
        places = jnp.arange(self.length + 1)[None]
        return jnp.where(places <= count[:, None], places, -1)

    def missed(self, params, draft, view, sampler, block, found):
        def now(block):
            model = ModelDraft(draft.cache, draft.length)
            tree = ModelDrafter(self.lm, Chain(self.length)).propose(params, model, view, sampler).tree
            fresh = tree.tokens[:, 1:], None if tree.log_q is None else tree.log_q[:, :-1]
            keep = lambda old, new: jnp.where(found.reshape(-1, *[1] * (old.ndim - 1)), old, new)
            return jax.tree.map(keep, block, fresh)

        return jax.lax.cond(jnp.any(view.live & ~found), now, lambda block: block, block)
