"""Typical acceptance (Medusa; Cai et al. 2024, arXiv:2401.10774), lossy: tokens that the target finds likely are kept."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.verify.base import Verifier
from specjax.verify.paths import entropy, kept
from specjax.verify.top_down import judged_by


@dataclasses.dataclass(frozen=True)
class Typical(Verifier):
    """A child x passes if p(x) > min(threshold, alpha exp(-H(p))), with H the entropy of p in nats.

    The target's own draw passes too. The longest path of passing nodes is kept, on a tie the likeliest, and the
    target's own draw follows it.

    Lossy: among tokens that pass, the draft chooses. Greedy rows keep greedy text. At a threshold of 1 with a large
    alpha only the target's own draw passes, as in `Coupled`.

    Two points are this library's: the target's own draw passes, and it follows the path as it was drawn. In the
    published rule only the test counts, and the token after a path is drawn from the tokens that pass the test.

    Attributes:
      threshold: a chance above which any token passes, in [0, 1].
      alpha: the factor of the inverse perplexity exp(-H); the product applies if it is less than the threshold.
    """

    about = About("typical", "keep what the target finds likely enough, by its entropy", "arXiv:2401.10774", "lossy")

    wants = Wants(logits=True, draw=True)

    threshold: float = 0.09
    alpha: float = 0.3

    def __post_init__(self):
        if not 0 <= self.threshold <= 1 or self.alpha < 0:
            raise ValueError(f"typical needs a threshold in [0, 1] and alpha >= 0, got {self}")

    def __call__(self, output, tree, sampler):
        p, _, offered = judged_by(output, tree, sampler)
        rows, parent = jnp.arange(tree.tokens.shape[0])[:, None], jnp.maximum(tree.parent, 0)
        tokens = jnp.maximum(tree.tokens, 0)
        enough = jnp.minimum(self.threshold, self.alpha * jnp.exp(-entropy(p)))
        chance = p[rows, parent, tokens]
        draw = output.draw[:, : tree.nodes]
        passes = (chance > enough[rows, parent]) | (tokens == draw[rows, parent])
        return kept(passes & offered.valid, chance, draw, tree)
