"""A draft model of another vocabulary, whose text is cut into the target's tokens (string-level exact match,
arXiv:2502.05202; `transformers` calls it universal assisted generation).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import ChainDrafter
from specjax.draft.vocabularies.pieces import pieces
from specjax.draft.vocabularies.shared import OtherTokens
from specjax.lm import Block, Wants


@dataclasses.dataclass(frozen=True)
class Slem(ChainDrafter, OtherTokens):
    """A draft model continues the text with its own likeliest tokens; what they write is drafted as the target's tokens.

    The draft model uses all of its tokens, not only those that both have. Its draft is the likeliest text, whatever the
    temperature. `specjax.draft.vocabularies.pieces` cuts it on the device, so no step waits for the host.

    Attributes:
      lm: the draft model.
      length: how many tokens it writes, and how many of the target's a step verifies, at most.
    """

    about = About(
        "slem",
        "a small model of another vocabulary, whose text is cut into the target's tokens",
        "arXiv:2502.05202",
        loads="other_text",
    )

    length: int = 4

    def bind(self, target):
        if self.length < 1:
            raise ValueError(f"slem needs length >= 1, got {self.length}")
        self.check(target)
        return self

    def propose(self, params, draft, view, sampler):
        draft, final = self.caught(params, draft, view)
        own, lm, past = params["draft"], self.lm.lm, None
        logits, tokens = lm.unembed(own["lm"], final), []
        for depth in range(1, self.length + 1):
            tokens.append(jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32))
            if depth == self.length:
                break
            block = Block(tokens[-1][:, None], draft.length[:, None] - 1 + depth, draft.length, _line(depth))
            output = lm(own["lm"], block, draft.cache, wants=Wants(logits=True), past=past)
            joined = lambda old, new: jnp.concatenate([old, new], axis=1)
            past = output.delta if past is None else jax.tree.map(joined, past, output.delta)
            logits = output.logits
        found = pieces(own, jnp.stack(tokens, axis=1), self.length)
        return self.chain(view, jnp.where(draft.cut[:, None], -1, found), draft)


def _line(depth: int) -> jax.Array:
    """What the one token of a level sees: those above it, and itself."""
    return jnp.ones((1, 1, depth), bool)
