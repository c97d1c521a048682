"""Children drawn independently from the draft's distribution, so two may be equal (SpecTr, arXiv:2310.15141)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About, abouts
from specjax.expand.fixed import FixedTree
from specjax.sampling.sampler import best
from specjax.tree import Children, Topology


@dataclasses.dataclass(frozen=True)
class IID(FixedTree):
    """Every child is an independent draw from the distribution at its parent; greedy rows take the likeliest tokens.

    Each node has its own noise, separate from that of the positions.

    Attributes:
      k: sequences, all starting at the root.
      length: tokens of each.
      tree: another shape, as child counts level by level (see `Topology.from_counts`); empty keeps these sequences.
    """

    about = About("iid", "draws that do not know of each other: k sequences, or a tree", "arXiv:2310.15141")

    k: int = 3
    length: int = 3
    tree: str = ""

    def __post_init__(self):
        if self.k < 1 or self.length < 1:
            raise ValueError(f"{abouts(type(self))[0].name} needs k and length of at least 1, got {self}")
        if len(self.topology.parents) < 2:
            raise ValueError(
                f"{abouts(type(self))[0].name} needs a tree of at least one node below the root, got {self.tree!r}"
            )

    @property
    def topology(self):
        return Topology.from_counts(self.tree or " | ".join([str(self.k)] + [f"1x{self.k}"] * (self.length - 1)))

    @property
    def children(self) -> Children:
        return "iid"

    def choose(self, sampler, logits, counts, *, depth, paths):
        batch, _, columns = logits.shape
        nodes, k = len(counts), max(counts)
        logits, paths = sampler.each(logits, nodes, paths)
        spread = lambda scores: jnp.broadcast_to(scores, (batch, nodes, columns))

        def likeliest(scores):
            values, found = jax.lax.top_k(scores, k)
            return jnp.broadcast_to(jnp.where(values > -jnp.inf, found, -1), (batch, nodes, k))

        def noisy():
            scores = sampler.warped(logits, paths)
            sampled = (sampler.params.temperature > 0)[:, None, None]
            return jnp.where(sampled, self.drawn(spread(scores), sampler, depth, counts), likeliest(scores))

        quiet = lambda: likeliest(sampler.penalised(logits, paths))
        if sampler.greedy:
            found = quiet()
        else:
            found = jax.lax.cond(jnp.any(sampler.live & (sampler.params.temperature > 0)), noisy, quiet)
        return jnp.where(found >= 0, sampler.tokens_of(jnp.maximum(found, 0)), -1).astype(jnp.int32)

    def drawn(self, scores, sampler, depth, counts):
        """Columns `[B, F, max(counts)]` drawn from `softmax(scores)` `[B, F, V]`, -1 where nothing is possible."""
        batch, nodes, columns = scores.shape
        k = max(counts)
        noise = sampler.children_noise(depth, nodes * k, columns).reshape(batch, nodes, k, columns)
        return jnp.stack([best(scores + noise[:, :, i]) for i in range(k)], axis=2)
