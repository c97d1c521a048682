"""Two-model drafting: a small LM of the same vocabulary grows the tree (Leviathan et al. 2023; Chen et al. 2023)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter, View, caught_up
from specjax.draft.head import params_dtype
from specjax.draft.trim import TrimmedLM, trimmed_model
from specjax.expand import Chain, Expander
from specjax.lm import LM, Block, Output, Wants, check_both_encode
from specjax.sampling import Sampler
from specjax.sharding.rules import shardings
from specjax.tree import Tree

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """The state of the draft model.

    Attributes:
      cache: the draft LM's cache, made of committed tokens only.
      length: `[B]` int32, tokens in the cache.
    """

    cache: Any
    length: Any


@dataclasses.dataclass(frozen=True)
class ModelDrafter(TreeDrafter):
    """Drafts with `params["draft"]`, the parameters of `lm`, through any expander.

    Attributes:
      lm: the draft model.
      expander: turns its next-token distributions into a tree.
    """

    about = About(
        "draft",
        "a small model of the same vocabulary",
        "arXiv:2211.17192, arXiv:2302.01318",
        expander="chain",
        loads="model",
    )
    tiles = True

    lm: LM
    expander: Expander = Chain()

    needs_params = True

    def bind(self, target):
        if self.lm.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has {self.lm.vocab_size} tokens and the target {target.vocab_size}: "
                "they must share one vocabulary (pick a draft with the target's tokenizer)"
            )
        check_both_encode(self.lm, target, "the draft model")
        tokens = getattr(self.lm, "kept", self.lm.vocab_size)
        if self.expander.width > tokens:
            raise ValueError(
                f"the expander takes {self.expander.width} candidates per node and the draft model has only {tokens} tokens"
            )
        return self

    def init(self, params, batch, capacity):
        return ModelDraft(
            self.lm.init_cache(batch, capacity, params_dtype(params["draft"])), jnp.zeros((batch,), jnp.int32)
        )

    def axes(self, draft):
        return ModelDraft(self.lm.cache_axes(draft.cache), ("batch",))

    def param_shardings(self, mesh, params):
        return shardings(mesh, self.lm.axes(params), params, self.lm.axis_counts())

    def encode(self, params, draft, source, tokens):
        return dataclasses.replace(draft, cache=self.lm.encode(params["draft"], draft.cache, source))

    def prefill(self, params, draft, chunk, output):
        own = dataclasses.replace(chunk.block, length=draft.length)
        delta = self.lm(params["draft"], own, draft.cache, wants=Wants()).delta
        # as in `propose`, the write comes after the reads: the keys and values of upper layers depend on those of lower ones
        firsts = [x[:, :1].reshape(x.shape[0], -1)[:, 0] for x in jax.tree.leaves(delta)]
        after = jnp.where(jnp.isnan(sum(x.astype(jnp.float32) for x in firsts)), 0, draft.length)
        real = chunk.real.sum(axis=1, dtype=jnp.int32)
        return ModelDraft(self.lm.commit(draft.cache, delta, None, after, real), draft.length + real)

    def catch_up(self, params, draft, view):
        return caught_up(self.prefill, params, draft, view)

    def trimmed(self, params, target_params, ids):
        lm, params = trimmed_model(self.lm, params, ids)
        return dataclasses.replace(self, lm=lm), params

    def begun(self, params: Any, draft: ModelDraft, view: View) -> tuple[ModelDraft, Array, Array]:
        """The state with the whole text read, the logits `[B, V]` after its end, and their features `[B, 1, E]`."""
        # Catch up on what the last step committed (its last token, the root, included) in one pass of fixed width.
        width = view.max_depth + 1
        positions = draft.length[:, None] + jnp.arange(width)[None]
        tokens = jnp.take_along_axis(view.tokens, positions, axis=1, mode="clip")
        block = Block(tokens, positions, draft.length)
        output = self.lm(params["draft"], block, draft.cache, wants=Wants(final=True))
        # As in the step: the write is made to depend on the read, so that the cache is updated in place. This may cost a broken
        # draft (NaN) its first slot; drafts change speed, never text.
        after = jnp.where(jnp.isnan(output.final[:, 0, 0]), 0, draft.length)
        cache = self.lm.commit(draft.cache, output.delta, None, after, view.length - draft.length)
        last = jnp.clip(view.length - draft.length - 1, 0, width - 1)
        final = jnp.take_along_axis(output.final, last[:, None, None], axis=1)
        return ModelDraft(cache, view.length), self.lm.unembed(params["draft"], final)[:, 0], final

    def passed(self, params: Any, block: Block, cache: Any, past: Any) -> Output:
        """A pass over drafted tokens, which nobody commits, with logits and features; `past` is the delta of earlier ones."""
        return self.lm(params, block, cache, wants=Wants(logits=True, final=True), past=past)

    def propose(self, params, draft, view, sampler):
        own, logits, final = self.begun(params, draft, view)
        return Proposal(self.grown(params, own, logits, final, view, sampler), own)

    def grown(self, params: Any, own: ModelDraft, logits: Array, final: Array, view: View, sampler: Sampler) -> Tree:
        """The tree below the last token that was read; the other arguments are what `begun` returns."""
        cache = own.cache

        def grow(carry, level):
            past, _ = carry
            positions = own.length[:, None] - 1 + jnp.full(level.tokens.shape, level.depth)
            block = Block(level.tokens, positions, own.length, level.visible)
            output = self.passed(params["draft"], block, cache, past)
            delta = output.delta
            if past is not None:
                delta = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), past, delta)
            return (delta, output.final), output.logits

        if isinstance(self.lm, TrimmedLM):
            sampler = sampler.restricted(params["draft"]["ids"], self.lm.vocab_size)
        return self.expander(view.root, logits, grow, (None, final), sampler, keep_q=view.keep_q)

    def hidden(self, carry):
        """The features `[B, E]` from which the last distribution was computed."""
        return carry[1][:, -1]
