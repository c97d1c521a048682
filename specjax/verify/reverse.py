"""Reverse speculative decoding (Kim et al. 2025, arXiv:2509.22230), lossy: a teacher drafts, and the student keeps the
tokens that it finds possible. It makes texts for training the student; it makes nothing faster.
"""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.sampling.sampler import best
from specjax.verify.base import Verdict, Verifier
from specjax.verify.paths import longest
from specjax.verify.top_down import at, judged_by


@dataclasses.dataclass(frozen=True)
class Reverse(Verifier):
    """A child x passes if p(x) >= threshold.

    The longest path of passing nodes is kept, on a tie the likeliest, and a separate draw from p follows it.

    The target is the student, and the drafter the teacher: so the text is the teacher's wherever the student can
    follow. Lossy in greedy rows too; there p is the softmax of their logits at temperature 1, and the likeliest token
    follows. At a threshold above 1 nothing passes, and the text is the student's.

    Attributes:
      threshold: the student's chance of a token that it can follow, at least 0.
    """

    about = About(
        "reverse",
        "the target as a student: keep what it finds possible of what a teacher drafts, to train it on",
        "arXiv:2509.22230",
        "lossy",
    )

    wants = Wants(logits=True)
    keeps_greedy = False

    threshold: float = 0.01

    def __post_init__(self):
        if self.threshold < 0:
            raise ValueError(f"reverse needs a threshold of at least 0, got {self}")

    def __call__(self, output, tree, sampler):
        p, finite, offered = judged_by(output, tree, sampler, soft=True)
        rows, parent = jnp.arange(tree.tokens.shape[0])[:, None], jnp.maximum(tree.parent, 0)
        chance = p[rows, parent, jnp.maximum(tree.tokens, 0)]
        passes = ((chance >= self.threshold) & (chance > 0) & offered.valid).at[:, 0].set(True)
        above = tree.ancestors()
        node = longest(jnp.all(passes[:, None] | ~above, axis=-1), chance, tree)
        dist = jnp.take_along_axis(p, node[:, None, None], axis=1)[:, 0]
        # with the noise of the draft the student's token would be the teacher's, whatever the student's distribution
        noise = sampler.residual_noise(at(tree.depth, node), dist.shape[-1])
        hot = sampler.params.temperature > 0
        token = best(jnp.where(dist > 0, jnp.log(dist), -jnp.inf) + jnp.where(hot[:, None], noise, 0))
        return Verdict(tree.path_to(node, above), at(tree.depth, node), jnp.where(at(finite, node), token, -1))
