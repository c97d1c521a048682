"""Stochastic beam search (Kool et al. 2019, arXiv:1903.06059); RSD-S makes a tree of its beams (arXiv:2402.14160)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.base import draws
from specjax.expand.dynamic import DynamicTree, Ranked


@dataclasses.dataclass(frozen=True)
class StochasticBeam(DynamicTree):
    """The `k` best partial sequences of every level, by their log-probability with Gumbel noise that grows with them.

    The best of a node's children has the node's own noisy value, so whole sequences are drawn without replacement, and
    so are a node's children. Only their noisy values decide which of them stay in the beam, and the size of a node's
    next value does not depend on which token it is. Hence rules for draws without replacement keep the target's
    distribution. In greedy rows this is plain beam search.

    Attributes:
      k: beam width.
      depth: levels below the root.
    """

    about = About(
        "stochastic_beam", "sequences drawn without replacement, by stochastic beam search", "arXiv:2402.14160"
    )

    k: int = 3
    depth: int = 3

    start = (0.0, 0.0)  # the log-probability, and that with noise

    def __post_init__(self):
        if self.k < 1 or self.depth < 1:
            raise ValueError(f"stochastic_beam needs k, depth >= 1, got {self}")

    @property
    def nodes(self) -> int:
        return 1 + self.k * self.depth

    @property
    def children(self):
        return "without_replacement"

    def keep(self, ranks, beams):
        return jnp.concatenate(beams, axis=1)

    def choose(self, sampler, logits, value, *, nodes, depth, paths):
        found = draws(sampler, logits, self.k, nodes=nodes, depth=depth, paths=paths)
        total, noisy = (x[:, :, None] for x in value)
        sampled = (sampler.params.temperature > 0)[:, None, None]
        own = total + found.log_q
        possible = (found.tokens >= 0) & (noisy > -jnp.inf)
        gumbel = lambda x: jnp.where(possible, total + x, 0.0)
        lower = jax.lax.cummin(lowered(gumbel(found.noisy), gumbel(found.noisy[..., :1]), noisy), axis=2)
        drawn = jnp.where(possible, lower, -jnp.inf)
        rank = jnp.where(sampled, drawn, jnp.where(possible, own, -jnp.inf))
        return Ranked(found.tokens, rank, (own, rank))


def lowered(values, largest, ceiling):
    """Gumbel values whose largest is `largest`, conditioned on the largest being `ceiling`: -log(e^-c - e^-m + e^-x)."""
    gap = ceiling - values + jnp.log1p(-jnp.exp(values - largest))  # -inf for the largest itself
    return ceiling - jnp.maximum(gap, 0) - jnp.log1p(jnp.exp(-jnp.abs(gap)))
