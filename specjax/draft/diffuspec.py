"""DiffuSpec: a diffusion model drafts for an autoregressive target (Li et al. 2025, arXiv:2510.02358).

One pass of the diffusion model gives a distribution for every position ahead, each without knowledge of the others'
tokens. A beam search goes through the likely tokens from left to right; a causal model of three tokens says which fit
together. The number of positions ahead follows what was drafted and accepted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, ladder
from specjax.draft.lattice import best_path, lattice
from specjax.draft.one_pass import OnePass
from specjax.draft.trigrams import in_tables, in_text
from specjax.sharding.rules import replicated
from specjax.tree import Topology, Tree

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffuSpecDraft:
    """The state of the diffusion model and of the rule for its block.

    Attributes:
      cache: the diffusion model's cache of committed tokens, each as it was when it was committed.
      length: `[B]` int32, tokens in the cache.
      proposed: `[B]` int32, tokens before the first end of text in the last block.
      generated: `[B]` float32, the running mean of those.
      accepted: `[B]` float32, the running mean of accepted tokens.
      block: `[B]` int32, the tokens of the next block.
    """

    cache: Any
    length: Any
    proposed: Any
    generated: Any
    accepted: Any
    block: Any


@dataclasses.dataclass(frozen=True)
class DiffuSpec(OnePass):
    """Drafts a chain, the best path through the likely tokens of a block; defaults are the paper's.

    `params["draft"]` is {`model`: the diffusion model's parameters, `trigrams`: tables of `specjax.draft.trigrams`}, or
    None in place of the tables: then the causal model counts in the row's own text.

    Attributes:
      lm: the diffusion model.
      mask_id: its mask; never proposed.
      shift: see `OnePass.shift`.
      length: tokens of the longest block, and of the first.
      least: tokens of the shortest block.
      more: how many tokens a block grows by where acceptance keeps up with what was generated.
      decay: the share of their old values that the running means keep at every step.
      mass: a position's candidates are the smallest set of likeliest tokens of this mass.
      most: the largest such set; an end of text comes on top.
      beams: paths that the search keeps.
      weight: of the diffusion model in a path's worth; the causal model has the rest.
      prior: of the causal model's counts, see `specjax.draft.trigrams`.
    """

    about = About(
        "diffuspec",
        "the best path through a diffusion model's likely tokens, by a beam and a causal model of three tokens",
        "arXiv:2510.02358",
        fields=("length", "least", "more", "decay", "mass", "most", "beams", "weight", "prior"),
        loads="diffusion_and_trigrams",
    )

    shift: bool = False
    length: int = 30
    least: int = 20
    more: int = 10
    decay: float = 0.5
    mass: float = 0.8
    most: int = 15
    beams: int = 3
    weight: float = 0.5
    prior: float = 4.0

    nodes = property(lambda self: self.length + 1)
    depth = property(lambda self: self.length)
    candidates = property(lambda self: self.most)
    needs_own_verdicts = True

    def __post_init__(self):
        sizes = 1 <= self.least <= self.length and self.more >= 0 and self.most >= 1 and self.beams >= 1
        shares = 0 <= self.decay < 1 and 0 < self.mass <= 1 and 0 <= self.weight <= 1 and self.prior > 0
        if not (sizes and shares):
            raise ValueError(
                "diffuspec needs 1 <= least <= length, more >= 0, most, beams >= 1, decay in [0, 1), mass in (0, 1], weight "
                f"in [0, 1] and prior > 0, got {self}"
            )

    @property
    def rungs(self):
        return ladder(self.nodes)

    def model(self, params):
        return params["draft"]["model"]

    def init(self, params, batch, capacity):
        each = lambda value, kind: jnp.full((batch,), value, kind)
        cache, length = self.fresh(params, batch, capacity)
        return DiffuSpecDraft(
            cache,
            length,
            proposed=each(0, jnp.int32),
            generated=each(0, jnp.float32),
            accepted=each(0, jnp.float32),
            block=each(self.length, jnp.int32),
        )

    def axes(self, draft):
        return DiffuSpecDraft(self.lm.cache_axes(draft.cache), *[("batch",)] * 5)

    def param_shardings(self, mesh, params):
        model = self.model_shardings(mesh, params["model"])
        return {"model": model, "trigrams": replicated(mesh, params["trigrams"])}

    def widened(self, params, k, width):
        from specjax.models.widening import tiled

        return params | {"model": tiled(params["model"], k, width)}

    def propose(self, params, draft, view, sampler):
        slots = jnp.arange(self.length)[None]
        cache, log_p = self.read(params, draft, view, slots < draft.block[:, None])
        given = lattice(log_p, sampler.eos, draft.block, self.mass, self.most)
        tables = params["draft"]["trigrams"]

        def causal(context, tokens):
            if tables is not None:
                return in_tables(tables, context, tokens)
            return in_text(view.tokens, view.length, context, tokens, self.lm.vocab_size, self.prior)

        at = view.length[:, None] - 2 + jnp.arange(2)[None]
        last = jnp.where(at >= 0, jnp.take_along_axis(view.tokens, jnp.maximum(at, 0), axis=1), -1)
        path, _ = best_path(given, last, causal, self.beams, self.weight)
        tokens = jnp.concatenate([view.root[:, None], path], axis=1)
        tree = Tree.of(Topology.chain(self.length), tokens, tokens >= 0)
        state = dataclasses.replace(draft, cache=cache, length=view.length, proposed=given.generated)
        return Proposal(tree, state)

    def observe(self, params, draft, proposal, output, verdict):
        live = verdict.committed > 0
        mean = lambda old, new: jnp.where(live, self.decay * old + (1 - self.decay) * new, old)
        generated, accepted = mean(draft.generated, draft.proposed), mean(draft.accepted, verdict.accepted)
        block = jnp.floor(generated).astype(jnp.int32) + jnp.where(accepted >= generated, self.more, 0)
        block = jnp.where(live, jnp.clip(block, self.least, self.length), draft.block)
        return dataclasses.replace(draft, generated=generated, accepted=accepted, block=block)
