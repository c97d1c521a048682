"""A diffusion model drafts for an autoregressive target, through any expander (after DiffuSpec, arXiv:2510.02358).

The drafter's expander searches paths through the distributions of one pass from left to right. Beside them it uses a
small causal model: which tokens followed a token earlier in the row's own text. The number of positions proposed ahead
follows the number of accepted tokens. `specjax.draft.diffuspec` is the published search.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter, ladder
from specjax.draft.one_pass import OnePass
from specjax.expand import Chain, Expander

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionDraft:
    """The state of the diffusion model.

    Attributes:
      cache: the diffusion model's cache of committed tokens, each as it was when it was committed.
      length: `[B]` int32, tokens in the cache.
      reach: `[B]` float32, the running mean of accepted tokens.
    """

    cache: Any
    length: Any
    reach: Any


@dataclasses.dataclass(frozen=True)
class DiffusionDrafter(TreeDrafter, OnePass):
    """Drafts with `params["draft"]`, the parameters of the diffusion model `lm`, through any expander.

    The distribution of the token at depth d after a parent t is `(prior p_d(v) + n(t, v)) / (prior + n(t))`. Here p_d
    is the diffusion model's, and n counts how often v followed t in the row's text.

    Attributes:
      lm: the diffusion model.
      mask_id: its mask; never proposed.
      expander: turns the distributions into a tree.
      shift: see `OnePass.shift`.
      prior: the weight of the diffusion model's distribution, in observed pairs.
      decay: the share of its old value that the running mean of accepted tokens keeps at every step.
      ahead: how many tokens beyond that mean are proposed; at the expander's depth or more, nothing is adapted.
    """

    about = About(
        "diffusion_draft",
        "a diffusion model's distributions for all positions ahead, from one pass, through any expander",
        "this library, after arXiv:2510.02358",
        fields=("prior", "decay", "ahead"),
        expander="chain",
        loads="diffusion_model",
    )
    tiles = True
    needs_own_verdicts = True

    expander: Expander = Chain()
    shift: bool = False
    prior: float = 4.0
    decay: float = 0.5
    ahead: int = 2

    def __post_init__(self):
        super().__post_init__()
        if not (self.prior > 0 and 0 <= self.decay < 1 and self.ahead >= 1):
            raise ValueError(f"diffusion_draft needs prior > 0, decay in [0, 1) and ahead >= 1, got {self}")

    @property
    def candidates(self) -> int:
        return self.expander.width

    @property
    def rungs(self):
        return ladder(self.nodes) if self.expander.is_chain else self.expander.rungs

    def init(self, params, batch, capacity):
        return DiffusionDraft(*self.fresh(params, batch, capacity), jnp.full((batch,), float(self.depth)))

    def axes(self, draft):
        return DiffusionDraft(self.lm.cache_axes(draft.cache), ("batch",), ("batch",))

    def param_shardings(self, mesh, params):
        return self.model_shardings(mesh, params)

    def propose(self, params, draft, view, sampler):
        cache, dists = self.read(params, draft, view, jnp.ones((view.root.shape[0], self.depth), bool))
        pairs = (
            view.tokens[:, :-1],
            view.tokens[:, 1:],
            jnp.arange(1, view.tokens.shape[1])[None] < view.length[:, None],
        )

        def behind(dist, parents):
            """Log-probabilities `[B, F, V]` after the parents `[B, F]`, from the diffusion model's `[B, V]`."""
            seen = followers(*pairs, parents, dist.shape[-1])
            total = self.prior + seen.sum(axis=-1, keepdims=True)
            return jnp.log(self.prior * jnp.exp(dist)[:, None] + seen) - jnp.log(total)

        def grow(carry, level):
            return carry, behind(dists[:, level.depth], level.tokens)

        tree = self.expander(
            view.root, behind(dists[:, 0], view.root[:, None])[:, 0], grow, None, sampler, keep_q=view.keep_q
        )
        limit = jnp.round(draft.reach).astype(jnp.int32) + self.ahead
        tree = dataclasses.replace(tree, valid=tree.valid & (tree.depth <= limit[:, None]))
        return Proposal(tree, dataclasses.replace(draft, cache=cache, length=view.length))

    def observe(self, params, draft, proposal, output, verdict):
        reach = self.decay * draft.reach + (1 - self.decay) * verdict.accepted
        return dataclasses.replace(draft, reach=jnp.where(verdict.committed > 0, reach, draft.reach))


def followers(before: Array, after: Array, real: Array, parents: Array, vocab_size: int) -> Array:
    """How often each token followed each of `parents` `[B, F]` among the `real` pairs `[B, P]`: `[B, F, V]` float32."""
    hits = (before[:, None] == parents[:, :, None]) & real[:, None]

    def count(hits, after):
        return jnp.zeros((vocab_size,)).at[after].add(hits.astype(jnp.float32), mode="drop")

    return jax.vmap(jax.vmap(count, in_axes=(0, None)))(hits, jnp.maximum(after, 0))
