"""A draft model of another vocabulary, some of whose n-grams are single tokens of the target (OmniDraft, arXiv:2507.02659)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter
from specjax.draft.vocabularies.grams import Chosen, Known, chosen, merged
from specjax.draft.vocabularies.shared import OtherTokens
from specjax.expand import Chain, Expander
from specjax.lm import Block, Wants

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Written:
    """What the draft model wrote below the root, in the blocks of `W` slots that spell the drafted tokens.

    Attributes:
      past: the delta of its slots; None if there are none.
      real: `[B, P]` bool, the slots with a token.
      final: `[B, 1, E]`, the feature of the last token.
    """

    past: Any
    real: Any
    final: Any


@dataclasses.dataclass(frozen=True)
class OmniDraft(OtherTokens, TreeDrafter):
    """Drafts tokens that both models have, and tokens of the target that several draft tokens spell.

    The latter are those of the row's own text so far: its cache. At each place the draft model weighs the cached n-grams
    whose first token is likeliest, in one pass. The distribution over the target's tokens is that of drawing draft
    tokens and taking the longest of these n-grams: an n-gram has the product of its tokens' probabilities, which the
    token that it begins with loses. One token is drawn from it, with the target's noise, and it is what `rejection`
    goes by.

    The authors draw draft tokens first and merge them afterwards. Then the probabilities of what was not drawn are not
    known, and the rest of the target's distribution after a rejection needs them. Their drafts end at a token that the
    target lacks; here the distribution is restricted to what it has, as that of `Tli` is.

    Attributes:
      lm: the draft model, a `SharedLM`.
      expander: turns its next-token distributions into a chain.
      slots: S, room of a row's cache.
      longest: W, draft tokens of the longest n-gram.
      guesses: K, how many n-grams are weighed at a place, at most.
    """

    about = About(
        "omnidraft",
        "a small model of another vocabulary, whose n-grams may be one token of the target",
        "arXiv:2507.02659",
        expander="chain",
        loads="other_model",
    )

    expander: Expander = Chain()
    slots: int = 256
    longest: int = 4
    guesses: int = 4

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.guesses <= self.slots or self.longest < 2:
            raise ValueError(
                "omnidraft needs 1 <= guesses <= slots and longest >= 2, got "
                f"guesses={self.guesses}, slots={self.slots} and longest={self.longest}"
            )

    @classmethod
    def check_tree(cls, expander):
        super().check_tree(expander)
        if not expander.is_chain:
            raise ValueError("omnidraft drafts chains: choose the expander chain or early_stop, or the drafter tli")

    def bind(self, target):
        self.check(target)
        return self

    def init(self, params, batch, capacity):
        width = min(self.longest, params["draft"]["spelling"].shape[1])
        return Known.of(super().init(params, batch, capacity), jnp.full((batch, self.slots), -1, jnp.int32), width)

    def trimmed(self, params, target_params, ids):
        raise ValueError("a draft over the target's tokens alone is not trimmed further: leave trim out")

    def propose(self, params, draft, view, sampler):
        own = params["draft"]
        draft, final = self.caught(params, draft, view)
        begun = Written(None, jnp.zeros((final.shape[0], 0), bool), final)

        def grow(written, level):
            written = self.spelt(own, draft, written, level.tokens[:, 0])
            return written, self.scored(own, draft, written)[:, None]

        first = self.scored(own, draft, begun)
        tree = self.expander(view.root, first, grow, begun, sampler, keep_q=view.keep_q)
        kept = ~draft.cut[:, None] | (jnp.arange(tree.nodes)[None] == 0)
        return Proposal(dataclasses.replace(tree, valid=tree.valid & kept), draft)

    def spelt(self, own: PyTree, draft: Known, written: Written, tokens: Array) -> Written:
        """With the draft tokens that spell one more token of the target, `[B]`."""
        ids = jnp.clip(tokens, 0, own["counts"].shape[0] - 1)
        width, sizes = draft.longest, own["counts"][ids]
        place = jnp.arange(width)
        positions = (draft.length + written.real.sum(axis=1))[:, None] + place[None]
        block = Block(
            own["spelling"][ids][:, :width], positions, draft.length, _seen(written.real, place[:, None] >= place[None])
        )
        output = self.lm.lm(own["lm"], block, draft.cache, wants=Wants(final=True), past=written.past)
        joined = lambda old, new: jnp.concatenate([old, new], axis=1)
        past = output.delta if written.past is None else jax.tree.map(joined, written.past, output.delta)
        last = jnp.clip(sizes - 1, 0, width - 1)[:, None, None]
        real = joined(written.real, place[None] < sizes[:, None])
        return Written(past, real, jnp.take_along_axis(output.final, last, axis=1))

    def scored(self, own: PyTree, draft: Known, written: Written) -> Array:
        """Logits `[B, V]` of the target's next token; -inf for tokens that are neither shared nor a weighed n-gram."""
        logits = self.lm.lm.unembed(own["lm"], written.final)[:, 0]
        scores = jnp.full((logits.shape[0], self.lm.vocab_size), -jnp.inf, logits.dtype)
        if draft.longest == 1:
            return scores.at[:, own["ids"]].set(logits[:, own["columns"]])
        grams = chosen(draft, own, logits, self.guesses)
        rest = jax.lax.cond(
            jnp.any(grams.real),
            lambda: self.rest(own, draft, written, grams),
            lambda: jnp.zeros(grams.ids.shape, jnp.float32),
        )
        logits, own_scores = merged(logits, grams, rest)
        at = jnp.where(grams.real, grams.ids, self.lm.vocab_size)
        scores = scores.at[:, own["ids"]].set(logits[:, own["columns"]])
        return scores.at[jnp.arange(at.shape[0])[:, None], at].set(own_scores, mode="drop")

    def rest(self, own: PyTree, draft: Known, written: Written, grams: Chosen) -> Array:
        """The log-probability `[B, K]` of each n-gram's other tokens after its first, by one pass over all of them."""
        rows, count, width = grams.tokens.shape
        each = width - 1
        slot = jnp.arange(count * each)
        within = (slot[:, None] // each == slot[None] // each) & (slot[:, None] >= slot[None])
        positions = (draft.length + written.real.sum(axis=1))[:, None] + (slot % each)[None]
        tokens = grams.tokens[:, :, :-1].reshape(rows, -1)
        block = Block(tokens, positions, draft.length, _seen(written.real, within))
        output = self.lm.lm(own["lm"], block, draft.cache, wants=Wants(final=True), past=written.past)
        logits = self.lm.lm.unembed(own["lm"], output.final)
        following = grams.tokens[:, :, 1:].reshape(rows, -1, 1)
        known = jnp.take_along_axis(logits, following, axis=2)[..., 0] - jax.nn.logsumexp(logits, axis=2)
        inside = jnp.arange(each)[None, None] + 1 < grams.sizes[:, :, None]
        return jnp.where(inside, known.reshape(rows, count, each), 0).sum(axis=2)

    def hidden(self, carry):
        """The features `[B, E]` from which the last distribution was computed."""
        return carry.final[:, -1]


def _seen(real: Array, within: Array) -> Array:
    """`[B, T, P + T]` bool: every slot sees the earlier blocks' tokens `[B, P]`, and of its own block `within` `[T, T]`."""
    rows, before = real.shape
    size = within.shape[0]
    earlier = jnp.broadcast_to(real[:, None], (rows, size, before))
    return jnp.concatenate([earlier, jnp.broadcast_to(within[None], (rows, size, size))], axis=2)
