"""FreeDave: several steps of static decoding from one pass, verified by the same pass (arXiv:2510.00294).

The next commits of static decoding are guessed from the present predictions: the n surest now, then the next n, and so
on. One pass reads all of these drafts. Each is kept if static decoding would have made it from the one before. So the
text is that of static decoding with the same cache, in fewer passes.

In the shape descriptions `K` denotes the drafts of a pass, `W` the positions of the active block.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.block import BlockDiffusion
from specjax.diffusion.cache.base import widths
from specjax.diffusion.common import block_of, first_open, put
from specjax.diffusion.decoder import DiffusionDecoder
from specjax.diffusion.fitting import fitted
from specjax.diffusion.partial_pass import read_drafts, read_whole
from specjax.diffusion.state import DiffusionInfo, DiffusionState
from specjax.diffusion.unmask.base import Choice, Guess, ranks
from specjax.diffusion.unmask.fixed import Fixed

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class FreeDave(Fixed):
    """`Fixed`, several steps per pass: the same text, whatever `drafts` is.

    Attributes:
      drafts: K.
      eager: the published eager acceptance, in which drafts reach into the next block. Once the first block is known,
        the next block's drafts are those of the last pass that saw it open, and the first of them is kept unseen. The
        text is no longer the same.
    """

    about = About(
        "free_dave",
        "fixed with the same cache, several steps per pass: the same text, unless eager",
        "arXiv:2510.00294",
        "same text",
    )

    drafts: int = 4
    eager: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.drafts < 1:
            raise ValueError(f"drafts must be at least 1, got {self.drafts}")

    @property
    def decoder(self):
        return FreeDaveDecoder

    @property
    def block_decoder(self):
        return FreeDaveBlocks


@dataclasses.dataclass(frozen=True)
class FreeDaveDecoder(DiffusionDecoder):
    """A `DiffusionDecoder` whose policy is `FreeDave`.

    Without a cache a pass reads K canvases; with one, it reads K times the positions that static decoding recomputes,
    over one cache.

    The first draft of a pass is the canvas as static decoding has it. The others follow from the predictions of the
    last pass over the block. The state's `memory` holds these: `tokens` and `score` `[B, W]`, whether there was such a
    pass (`ready` `[B]`), and how many static steps the first draft is ahead of the canvas (`owed` `[B]`: 1 if nothing
    of it was committed yet).

    A pass keeps drafts as long as they are static decoding's, and commits the next static step after the last kept one.
    So it never commits fewer tokens than static decoding.
    """

    policy: FreeDave = FreeDave()

    def checked(self):
        if self.cfg_scale:
            raise ValueError("free_dave takes no guidance yet: choose cfg_scale 0")
        if self.cache.keeps and not self.cache.steady:
            raise ValueError(
                "free_dave reuses a cache while a block lasts: choose the cache none, or prefix or dual without refresh"
            )
        return super().checked()

    @property
    def span(self):
        return self.block_length * (1 + self._blocks_ahead)

    @property
    def _blocks_ahead(self):
        if not self.policy.eager:
            return 0
        steps = min(self.policy.steps or self.block_length, self.block_length)
        return -(-self.policy.drafts // steps)

    @property
    def _onward(self) -> bool:
        """Whether a pass also sees a draft's next block."""
        return not self.cache.keeps

    def blank(self, batch, capacity):
        """See `DiffusionDecoder.blank`."""
        shape = (batch, self.span)
        return {
            "tokens": jnp.zeros(shape, jnp.int32),
            "score": jnp.zeros(shape),
            "ready": jnp.zeros((batch,), bool),
            "owed": jnp.zeros((batch,), jnp.int32),
        }

    def _advance(self, params, state, at, masked):
        memory = state.memory
        commit = self._drafted(state, at, masked)
        block = block_of(state.tokens, at)
        drafts = jnp.where(commit, memory["tokens"][:, None], block[:, None])
        with jax.named_scope("target"):
            final, first, state = self._look(params, state, at, masked[:, None] & ~commit, drafts)
        begin = state.step + memory["owed"]
        with jax.named_scope("verify"):
            kept = self._agreeing(params, state, at, masked, commit, drafts, final, first, begin)
        pick = lambda x: jnp.take_along_axis(x, kept.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]

        # static decoding's step after the last draft that was kept
        drafted, seen = pick(commit), pick(final)
        here = masked & ~drafted
        crossed = masked.any(axis=1) & ~here.any(axis=1)
        static = jnp.where(crossed, 0, begin + kept)
        there, ahead = at, here
        ours = dataclasses.replace(state, step=static, tokens=put(state.tokens, at, drafted, memory["tokens"]))
        if self._onward:
            reached = first_open(ours.tokens, state.limit, self.mask_id)
            there, ahead = self._masked(dataclasses.replace(ours, reached=reached))
        guess = self._expect(params, ours, there, ahead, seen, first)
        score = self._ranked(guess)
        bad = jnp.any(ahead & (guess.tokens < 0), axis=1)
        failed = bad & ~crossed
        step = ranks(score, here) < self._count(begin + kept, state.entry)[:, None]
        step = self._seeded(dataclasses.replace(state, step=begin + kept), here, step) & here & ~failed[:, None]
        step = self._fitting(ours, at, step, score, guess.tokens)

        choice = Choice(drafted | step, score, jnp.where(drafted, memory["tokens"], guess.tokens))
        fresh = {"tokens": guess.tokens, "score": score, "ready": ~bad & ~state.done}
        remembered = self._kept_eagerly(memory, {**fresh, "owed": jnp.zeros_like(kept)}, here)
        new = self._commit(state, at, masked, choice.commit, choice, remembered, failed)
        new = dataclasses.replace(
            new,
            step=jnp.where(new.done | (new.step == 0), new.step, begin + kept + 1),
            memory=self._onwards(new, fresh, crossed),
        )
        return new, DiffusionInfo(at[:, 0], choice.commit, choice)

    def _drafted(self, state, at, masked):
        """The commits of each draft `[B, K, W]`: none, then static decoding's next steps if predictions stay as they are."""
        memory, after = state.memory, []
        for ahead in range(self.policy.drafts):
            after.append(self._count(state.step + ahead, state.entry))
        total = jnp.cumsum(jnp.stack(after, axis=1), axis=1)
        total = jnp.concatenate([jnp.zeros_like(total[:, :1]), total], axis=1)  # of so many steps
        steps = memory["owed"][:, None] + jnp.arange(self.policy.drafts)[None]
        total = jnp.take_along_axis(total, steps, axis=1)
        rank = ranks(memory["score"], masked)
        drafted = (rank[:, None] < total[:, :, None]) & (masked & memory["ready"][:, None])[:, None]
        # the first one is static decoding's as it is; the others are verified
        first = self._fitting(state, at, drafted[:, 0], memory["score"], memory["tokens"])
        return drafted.at[:, 0].set(first)

    def _fitting(self, state, at, commit, score, tokens):
        """Static decoding's commits `[B, W]`, see `fitted`."""
        return fitted(state, self._gaps(state), at, at, commit, Choice(commit, score, tokens))[0]

    def _agreeing(self, params, state, at, masked, commit, drafts, final, first, begin):
        """How many drafts after the first are static decoding's `[B]`."""
        count = self.policy.drafts - 1
        if not count:
            return jnp.zeros_like(begin)
        rows = jnp.repeat(jnp.arange(begin.shape[0]), count)
        of_each = lambda x: x[:, :-1].reshape(rows.shape[0], *x.shape[2:])
        wide = jax.tree.map(lambda leaf: leaf[rows], dataclasses.replace(state, cache=None, memory=()))
        step = (begin[:, None] + jnp.arange(count)[None]).reshape(-1)
        left = masked[rows] & ~of_each(commit)
        wide = dataclasses.replace(wide, step=step, tokens=of_each(self._canvases(state, at, drafts)))
        guess = self._expect(params, wide, at[rows], left, of_each(final), first[rows])
        score = self._ranked(guess)
        following = left & (ranks(score, left) < self._count(step, wide.entry)[:, None])
        following = self._fitting(wide, at[rows], following, score, guess.tokens)
        made = jnp.where(following, guess.tokens, of_each(drafts))
        same = jnp.all(made == drafts[:, 1:].reshape(made.shape), axis=1) & left.any(axis=1)
        same = same & ~jnp.any(left & (guess.tokens < 0), axis=1)
        chain = jnp.cumprod(same.reshape(-1, count).astype(jnp.int32), axis=1).sum(axis=1)
        return jnp.where(state.memory["ready"], chain, 0)

    def _count(self, step, entry):
        """How many tokens static decoding's pass number `step` commits; an eager pass commits the same number each time."""
        if self._blocks_ahead:
            step, entry = jnp.zeros_like(step), jnp.full_like(entry, self.block_length)
        return jnp.maximum(self.policy.count(step, entry, self.rounded), 1)

    def _ranked(self, guess: Guess):
        """How sure each prediction is `[B, W]`; if drafts reach into the next blocks, the earlier blocks come first."""
        score = self.policy.score(guess)
        if not self._blocks_ahead:
            return score
        later = jnp.arange(self.span) // self.block_length
        return score - later[None] * (1 + math.log(self.target.vocab_size))  # no rule's scores are further apart

    def _kept_eagerly(self, memory, fresh, here):
        """The new memory: in an eager pass over a block whose first part is known, the memory before the pass."""
        if not self._blocks_ahead:
            return fresh
        stays = memory["ready"] & ~jnp.any(here[:, : self.block_length], axis=1)
        fixed = {**memory, "owed": jnp.ones_like(memory["owed"])}
        return jax.tree.map(lambda a, b: jnp.where(jnp.expand_dims(stays, tuple(range(1, a.ndim))), a, b), fixed, fresh)

    def _onwards(self, new, fresh, crossed):
        """The memory of rows that entered a block that the pass has seen."""
        if not self._onward:
            return new.memory
        fresh = {**fresh, "owed": jnp.ones_like(new.step)}
        entered = crossed & ~new.done
        return jax.tree.map(
            lambda a, b: jnp.where(jnp.expand_dims(entered, tuple(range(1, a.ndim))), a, b), fresh, new.memory
        )

    def _look(self, params, state, at, left, drafts) -> tuple[Array, Array, DiffusionState]:
        """Features `[B, K, N, E]` of the drafts, their first positions `[B]`, and the state with its cache after that pass."""
        count, size = self.policy.drafts, state.tokens.shape[1]
        canvases = self._canvases(state, at, drafts)
        if not self.cache.keeps:
            flat = canvases.reshape(-1, size)
            final = read_whole(self.target, params["target"], flat, jnp.repeat(state.limit, count)).final
            return final.reshape(*canvases.shape, -1), jnp.zeros_like(state.step), state
        source = jnp.maximum(at[:, :1] - self.shift + jnp.arange(self.span + self.shift)[None], 0)
        own = jnp.maximum(at - self.shift, 0)
        active, wide = self._asked(state, own, left[:, 0])
        wanted = left.any(axis=2) & state.memory["ready"][:, None]
        wanted = wanted.at[:, 0].set(True)
        needed = count * (
            self.span + 1
        )  # for all drafts; the widths grow by the same factor, because each is a program
        most = max(size, count * self.cache.most(self.span + 1, size))
        final, cache = read_drafts(
            self.target, params["target"], state.cache, canvases, active[:, None] & wanted[:, :, None],
            self._seen(state), source, (*widths(needed - 1, most, self.growth and max(count, self.growth)), most),
            wide & ~jnp.any(wanted[:, 1:], axis=1),
        )  # fmt: skip
        return final, at[:, 0] - self.shift, dataclasses.replace(state, cache=cache)

    def _canvases(self, state, at, drafts):
        """The canvases `[B, K, L]` with drafts `[B, K, W]` of the block."""
        each = jax.vmap(put, in_axes=(None, None, None, 1), out_axes=1)
        return each(state.tokens, at, jnp.ones_like(at, bool), drafts)

    def _expect(self, params, state, at, masked, final, first) -> Guess:
        """The predictions for the positions `at` from features `[B, N, E]`, which begin at the position `first`."""
        slot = at - self.shift - first[:, None]
        features = jnp.take_along_axis(final, slot[:, :, None], axis=1, mode="clip")
        return self._guess(
            state, at, masked, self._possible(state, at, self.target.unembed(params["target"], features))
        )


@dataclasses.dataclass(frozen=True)
class FreeDaveBlocks(FreeDaveDecoder, BlockDiffusion):
    """The same for models whose blocks do not see later ones.

    A pass reads K drafts of a block over their exact cache, or stores a finished block.
    """

    @property
    def _onward(self):
        return False

    def checked(self):
        if self.policy.eager:
            raise ValueError("eager drafts read the next block too, which these models do not see: leave eager out")
        return super().checked()

    def _look(self, params, state, at, left, drafts):
        several = jnp.any(state.memory["ready"] & left[:, 0].any(axis=1))
        return self._read_blocks(params, state, at, self._canvases(state, at, drafts), several)
