"""Blocks that see only earlier ones, over a canvas whose model sees all: discrete diffusion forcing (arXiv:2508.09192)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.cache.base import Cache


@dataclasses.dataclass(frozen=True)
class BlockCausal(Cache):
    """A position sees the prompt, its own block and earlier blocks, as models of D2F are trained to.

    Blocks count from the prompt's end, and the prompt is one block. So what was computed for a finished block stays
    right: a pass recomputes everything from the first block that the last pass changed or that is open. Other texts
    come from this attention than from the whole one, but they do not depend on what is reused.
    """

    about = About(
        "block_causal", "blocks see only earlier ones, so finished ones are exact", "arXiv:2508.09192", "lossy"
    )

    def groups(self, canvas):
        return jnp.maximum((canvas.at - canvas.prompt_length[:, None]) // canvas.width, -1)

    def active(self, canvas):
        groups, of = self.groups(canvas), lambda at: (at - canvas.prompt_length) // canvas.width
        changed = jnp.min(jnp.where(canvas.fresh, groups, groups.shape[1]), axis=1)
        first = jnp.minimum(changed, of(canvas.start))
        return (groups >= first[:, None]) & (groups <= of(canvas.reach - 1)[:, None])
