"""Loosely speculative decoding (FLy; Li et al. 2025, arXiv:2511.22972), lossy: if the target is unsure, another token
passes if the target agrees again afterwards.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.verify.base import Verdict, Verifier
from specjax.verify.paths import entropy, longest
from specjax.verify.top_down import at, judged_by


@dataclasses.dataclass(frozen=True)
class Fly(Verifier):
    """Another token than the target's own draw may pass if the target is unsure and agrees with the nodes after it.

    Such a child passes if three conditions hold:

    - H3 >= threshold. H3 is the part of the entropy of the model's own distribution that its three likeliest tokens
      contribute, whatever a row's temperature.
    - The next `window` nodes of its path all are the target's own draws.
    - It is not among the last `window` + 1 levels of the draft.

    The longest path that fulfils this is kept, on a tie the likeliest, and the target's own draw follows it.

    Lossy in greedy rows too. With a threshold that H3 never reaches it is `Coupled`. The defaults are the authors',
    whose drafts have 15 tokens: in a draft of `window` + 1 tokens or fewer, only the target's own draws pass.

    Two points are this library's. Tokens that the target's distribution rules out (a filter, a bad word) never pass. A
    sampled row has one draw per node; the released code takes either of two.

    Attributes:
      threshold: the H3, in nats, from which a token other than the target's may stand; at least 0.
      window: how many of the target's own tokens must follow such a token in the draft; 0 for none.
    """

    about = About(
        "fly",
        "keep another token where the target is unsure, if it agrees again after it",
        "arXiv:2511.22972",
        "lossy",
    )

    wants = Wants(logits=True, draw=True)
    keeps_greedy = False

    threshold: float = 0.3
    window: int = 5

    def __post_init__(self):
        if self.threshold < 0 or self.window < 0:
            raise ValueError(f"fly needs a threshold and a window of at least 0, got {self}")

    def __call__(self, output, tree, sampler):
        p, _, offered = judged_by(output, tree, sampler, soft=True)
        own_dist = jax.nn.softmax(output.logits[:, : tree.nodes], axis=-1)
        last = jnp.where(tree.valid, tree.depth, 0).max(axis=1, keepdims=True) - self.window - 1
        rows, parent = jnp.arange(tree.tokens.shape[0])[:, None], jnp.maximum(tree.parent, 0)
        draw = output.draw[:, : tree.nodes]
        own = tree.tokens == draw[rows, parent]
        chance = p[rows, parent, jnp.maximum(tree.tokens, 0)]
        unsure = (entropy(jax.lax.top_k(own_dist, min(3, p.shape[-1]))[0]) >= self.threshold)[rows, parent]
        loose = unsure & (chance > 0) & (tree.depth <= last)
        lost = self.window + 1
        owed = jnp.zeros(
            tree.tokens.shape, jnp.int32
        )  # own tokens that must still follow; `lost`: the path cannot be kept any more
        for depth in range(1, tree.max_depth + 1):
            before = owed[rows, parent]
            other = jnp.where((before == 0) & loose, self.window, lost)
            after = jnp.where(own, jnp.maximum(before - 1, 0), other)
            after = jnp.where(offered.valid & (before < lost), after, lost)
            owed = jnp.where(tree.depth == depth, after, owed)
        node = longest((owed == 0).at[:, 0].set(True), chance, tree)
        return Verdict(tree.path_to(node, tree.ancestors()), at(tree.depth, node), at(draw, node))
