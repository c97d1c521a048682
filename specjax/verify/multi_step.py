"""Multi-step speculative sampling (SpecInfer; Miao et al. 2023, algorithm 2): siblings are tried in a random order."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.sampling.noise import ORDER
from specjax.verify.recursive import Recursive


@dataclasses.dataclass(frozen=True)
class MultiStep(Recursive):
    """`Recursive`, but the next of the untried siblings is drawn at random.

    A node has a child accepted equally often. If the first children have more below them, `Recursive` gets further.
    """

    about = About(
        "multi_step",
        "try i.i.d. children in a random order, each against the residual of p",
        "arXiv:2305.09781, algorithm 2",
        "same distribution",
        tree="iid:length={depth}",
    )

    def order(self, tree, sampler):
        place = tree.depth + sampler.uniform_of(tree.depth, ORDER)  # siblings change places, levels do not
        return jnp.argsort(place.at[:, 0].set(-1), axis=1)[:, 1:]
