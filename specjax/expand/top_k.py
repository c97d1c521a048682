"""EAGLE-2's dynamic tree (Li et al. 2024, section 4) and OPT-Tree (Wang et al. 2024): the nodes with the most
cumulative worth.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.base import candidates
from specjax.expand.dynamic import DynamicTree, Ranked


@dataclasses.dataclass(frozen=True)
class TopK(DynamicTree):
    """Every level scores the `k` worthiest nodes and takes `k` candidates of each; the best `nodes - 1` of all are kept.

    Which nodes are kept depends on the draws, so no distribution describes how a kept node's children came to be. A
    verifier takes them as they are, and there is no `log_q`.

    Attributes:
      k: beam width and candidates per node. With k >= `nodes` - 1 no other tree with as many nodes is worth more.
      depth: levels below the root.
      nodes: kept tree nodes, including the root.
      coupled: whether worth is `log softmax((log q + g) / tau)`, the chance that a candidate is the target's token
        given the shared noise. False is EAGLE-2 as published, with worth `log q`.
      tau: see `coupled`.
      threshold: a row grows another level if the last level added more than this to the tree's expected accepted
        tokens, the sum of its nodes' chances (OPT-Tree); 0 always grows. Once no live row grows, no more is computed.
    """

    about = (
        About("top_k", "a dynamic tree ranked by the chance to be the target's draw given the noise", "this library"),
        About(
            "eagle2",
            "a dynamic tree ranked by draft probability",
            "arXiv:2406.16858, section 4",
            defaults={"coupled": False},
        ),
        About(
            "opt_tree",
            "the tree of most expected tokens by draft probability, as deep as that pays",
            "arXiv:2406.17276",
            defaults={"coupled": False, "k": 8, "depth": 8, "nodes": 9, "threshold": 0.5},
        ),
    )

    k: int = 4
    depth: int = 4
    nodes: int = 12
    coupled: bool = True
    tau: float = 1.0
    threshold: float = 0.0

    start = 0.0

    def __post_init__(self):
        most = 1 + self.k + (self.depth - 1) * self.k * self.k
        good = self.k >= 1 and self.depth >= 1 and 2 <= self.nodes <= most and self.tau > 0 and self.threshold >= 0
        if not good:
            raise ValueError(f"top_k needs k, depth >= 1, tau > 0, threshold >= 0 and nodes in [2, {most}], got {self}")

    def choose(self, sampler, logits, value, *, nodes, depth, paths):
        few = candidates(
            sampler, logits, self.k, nodes=nodes, depth=depth, paths=paths, coupled=self.coupled, tau=self.tau
        )
        total = value[:, :, None] + few.worth
        return Ranked(few.tokens, total, total)

    def goes_on(self, ranks, going):
        if not self.threshold:
            return None
        gained = self._expected(ranks) - (self._expected(ranks[:-1]) if len(ranks) > 1 else 0.0)
        return going & (gained > self.threshold)

    def _expected(self, ranks):
        """How many tokens `[B]` of the best tree so far the draft expects to be accepted."""
        every = jnp.concatenate(ranks, axis=1)
        return jnp.exp(jax.lax.top_k(every, min(self.nodes - 1, every.shape[1]))[0]).sum(axis=1)
