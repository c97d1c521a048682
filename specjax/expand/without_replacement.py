"""Children drawn one after the other, none twice: Gumbel top-k (RSD-C, arXiv:2402.14160)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.iid import IID


@dataclasses.dataclass(frozen=True)
class WithoutReplacement(IID):
    """A node's children are draws from its distribution without the earlier ones; with too few tokens, a node has fewer
    children.

    They are the largest of `log q + g` with the node's own noise g. In trees of `Static`, g is the position's noise,
    which nodes of one depth share. See `IID` for the shape, and for greedy rows.
    """

    about = About(
        "without_replacement",
        "draws of which none comes twice below a node: k sequences, or a tree",
        "arXiv:2402.14160",
    )

    @property
    def children(self):
        return "without_replacement"

    def drawn(self, scores, sampler, depth, counts):
        noise = sampler.children_noise(depth, scores.shape[1], scores.shape[2])
        values, found = jax.lax.top_k(scores + noise, max(counts))
        return jnp.where(values > -jnp.inf, found, -1)
