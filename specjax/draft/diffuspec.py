"""DiffuSpec: a diffusion language model drafts for an autoregressive target (Li et al. 2025, arXiv:2510.02358).

One pass of the diffusion model over mask tokens after the text gives a distribution for every position ahead, each
without knowledge of the others' tokens. The drafter's expander searches paths through that lattice from left to right.
Beside the distributions it uses a small causal model: which tokens followed a token earlier in the row's own text. The
number of positions proposed ahead follows the number of accepted tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter, caught_up, ladder
from specjax.expand import Chain, Expander
from specjax.lm import LM, Block, Wants, check_both_encode, check_both_ways
from specjax.sharding.rules import shardings

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffuSpecDraft:
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
class DiffuSpec(TreeDrafter):
    """Drafts with `params["draft"]`, the parameters of the diffusion model `lm`, through any expander.

    The distribution of the token at depth d after a parent t is `(prior p_d(v) + n(t, v)) / (prior + n(t))`. Here p_d
    is the diffusion model's, and n counts how often v followed t in the row's text. The paper's causal model is an
    n-gram model of a corpus; this one needs no corpus.

    A committed token's keys and values come from the pass that first saw it (Fast-dLLM's prefix cache). Outside the
    prompt, that pass had the masks after the token. So a step reads only the new tokens and the masks.

    Attributes:
      lm: the diffusion model.
      mask_id: its mask; never proposed.
      expander: turns the distributions into a tree.
      shift: whether the model's output at position i - 1 is for position i (Dream), rather than the output at i
        (LLaDA).
      prior: the weight of the diffusion model's distribution, in observed pairs.
      decay: the share of its old value that the running mean of accepted tokens keeps at every step.
      ahead: how many tokens beyond that mean are proposed; at the expander's depth or more, nothing is adapted.
    """

    about = About(
        "diffuspec",
        "a diffusion model's distributions for all positions ahead, from one pass",
        "arXiv:2510.02358",
        fields=("prior", "decay", "ahead"),
        expander="chain",
        loads="diffusion_model",
    )
    tiles = True

    lm: LM
    mask_id: int
    expander: Expander = Chain()
    shift: bool = False
    prior: float = 4.0
    decay: float = 0.5
    ahead: int = 2

    needs_params = True

    def __post_init__(self):
        if not (self.prior > 0 and 0 <= self.decay < 1 and self.ahead >= 1):
            raise ValueError(f"diffuspec needs prior > 0, decay in [0, 1) and ahead >= 1, got {self}")

    @property
    def rungs(self):
        return ladder(self.nodes) if self.expander.is_chain else self.expander.rungs

    def bind(self, target):
        check_both_ways(self.lm, "a diffusion model")
        check_both_encode(self.lm, target, "the diffusion model")
        if self.lm.vocab_size != target.vocab_size:
            raise ValueError(
                f"the diffusion model has {self.lm.vocab_size} tokens and the target {target.vocab_size}: they must share "
                "one vocabulary"
            )
        if not 0 <= self.mask_id < self.lm.vocab_size:
            raise ValueError(f"mask_id {self.mask_id} is outside the vocabulary of {self.lm.vocab_size} tokens")
        if self.expander.width >= self.lm.vocab_size:
            raise ValueError(
                f"the expander takes {self.expander.width} candidates per node: fewer than the vocabulary holds"
            )
        return self

    def init(self, params, batch, capacity):
        dtype = jax.tree.leaves(params["draft"])[0].dtype
        full = jnp.full((batch,), float(self.depth))
        return DiffuSpecDraft(self.lm.init_cache(batch, capacity, dtype), jnp.zeros((batch,), jnp.int32), full)

    def axes(self, draft):
        return DiffuSpecDraft(self.lm.cache_axes(draft.cache), ("batch",), ("batch",))

    def param_shardings(self, mesh, params):
        return shardings(mesh, self.lm.axes(params), params, self.lm.axis_counts())

    def prefill(self, params, draft, chunk, output):
        block = Block(
            chunk.block.tokens, chunk.block.positions, draft.length, self._seen(draft, chunk.real), causal=False
        )
        delta = self.lm(params["draft"], block, draft.cache, wants=Wants()).delta
        cache = self.lm.commit(draft.cache, delta, None, draft.length)
        return dataclasses.replace(draft, cache=cache, length=draft.length + chunk.real.sum(axis=1, dtype=jnp.int32))

    def catch_up(self, params, draft, view):
        return caught_up(self, params, draft, view)

    def _seen(self, draft, real):
        """The visibility `[B, T, T]`: every token sees all real tokens, and every slot itself."""
        return real[:, None, :] | jnp.eye(real.shape[1], dtype=bool)[None]

    def propose(self, params, draft, view, sampler):
        cache, dists = self._read(params, draft, view)
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

    def _read(self, params, draft, view):
        """One pass over the tokens of the last step and the masks after them: the cache, and log-probabilities `[B, D, V]`."""
        batch, width, ahead = view.tokens.shape[0], view.max_depth + 1, self.depth
        at = draft.length[:, None] + jnp.arange(width)[None]
        masks = view.length[:, None] + jnp.arange(ahead)[None]
        tokens = jnp.concatenate(
            [jnp.take_along_axis(view.tokens, at, axis=1, mode="clip"), jnp.full((batch, ahead), self.mask_id)], axis=1
        )
        real = jnp.concatenate([at < view.length[:, None], jnp.ones((batch, ahead), bool)], axis=1)
        block = Block(tokens, jnp.concatenate([at, masks], axis=1), draft.length, self._seen(draft, real), causal=False)
        output = self.lm(params["draft"], block, draft.cache, wants=Wants(final=True))
        # the write depends on the read, so that the cache is updated in place; see `ModelDrafter.propose`
        after = jnp.where(jnp.isnan(output.final[:, 0, 0]), 0, draft.length)
        cache = self.lm.commit(draft.cache, jax.tree.map(lambda x: x[:, :width], output.delta), None, after)
        last = jnp.clip(view.length - draft.length - 1, 0, width - 1)
        of_root = jnp.take_along_axis(output.final, last[:, None, None], axis=1)
        of_masks = output.final[:, width:]
        final = jnp.concatenate([of_root, of_masks[:, :-1]], axis=1) if self.shift else of_masks
        logits = self.lm.unembed(params["draft"], final)
        return cache, jax.nn.log_softmax(logits.at[:, :, self.mask_id].set(-jnp.inf), axis=-1)

    def observe(self, params, draft, proposal, output, verdict):
        reach = self.decay * draft.reach + (1 - self.decay) * verdict.accepted
        return dataclasses.replace(draft, reach=jnp.where(verdict.committed > 0, reach, draft.reach))


def followers(before: Array, after: Array, real: Array, parents: Array, vocab_size: int) -> Array:
    """How often each token followed each of `parents` `[B, F]` among the `real` pairs `[B, P]`: `[B, F, V]` float32."""
    hits = (before[:, None] == parents[:, :, None]) & real[:, None]

    def count(hits, after):
        return jnp.zeros((vocab_size,)).at[after].add(hits.astype(jnp.float32), mode="drop")

    return jax.vmap(jax.vmap(count, in_axes=(0, None)))(hits, jnp.maximum(after, 0))
