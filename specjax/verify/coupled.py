"""Coupled verification: position t of a row owns one Gumbel vector, and a node is kept if it is the target's own draw.

The target's token is `argmax(log p + g)`, an exact sample of p, whatever was drafted; so the text equals plain
sampling's token for token. Greedy verification is the case g = 0. A drafter that ranks candidates by `log q + g` with
the same g agrees with the target far more often than an independent one.
"""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.verify.base import Verdict, Verifier


@dataclasses.dataclass(frozen=True)
class Coupled(Verifier):
    """Keeps the deepest path whose every token is the target's draw at its parent. Lossless for any tree."""

    about = About(
        "coupled", "keep the target's own draw; same text as plain decoding, any tree", "this library", "same text"
    )

    wants = Wants(draw=True)
    text_follows_draft = False

    def __call__(self, output, tree, sampler):
        draw = output.draw  # [B, N]
        batch = draw.shape[0]
        if tree.max_depth == 0:
            zero = jnp.zeros((batch,), jnp.int32)
            return Verdict(zero[:, None], zero, draw[:, 0])
        above = tree.ancestors()
        wanted = jnp.take_along_axis(draw, jnp.maximum(tree.parent, 0), axis=1)
        match = (tree.valid & (tree.tokens == wanted)).at[:, 0].set(True)
        kept = jnp.all(match[:, None, :] | ~above, axis=-1)
        best = jnp.argmax(jnp.where(kept, tree.depth, -1), axis=1)
        take = lambda x: jnp.take_along_axis(x, best[:, None], axis=1)[:, 0]
        return Verdict(tree.path_to(best, above), take(tree.depth), take(draw))
