"""The masked-diffusion step: read the canvas, guess the active block, commit what the policy chooses.

In the shape descriptions `B` denotes rows, `R` inserted rows, `L` the canvas, `W` the block length, `V` the vocabulary.
"""

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoder import Decoder
from specjax.diffusion import layerwise
from specjax.diffusion.cache.base import Cache, Canvas, widths
from specjax.diffusion.cache.none import NoCache
from specjax.diffusion.common import (
    CHOOSE,
    at_least_one,
    block_of,
    draws,
    ends_at,
    first_open,
    put,
)  # fmt: skip
from specjax.diffusion.fitting import fitted, gaps_of
from specjax.diffusion.partial_pass import read_drafts, read_whole
from specjax.diffusion.state import DiffusionInfo, DiffusionState
from specjax.diffusion.unmask.base import Guess, Overview, Unmask
from specjax.diffusion.unmask.threshold import Threshold
from specjax.lm import LM
from specjax.prompts import OPEN, Prompts
from specjax.sampling.noise import uniform
from specjax.sampling.sampler import best
from specjax.sampling.warp import filled, fillings, warp
from specjax.sharding.ambient import on_mesh
from specjax.sharding.rules import constrain, rounded
from specjax.state import Finish, Stats, finish_rows
from specjax.warpers.gaps import Gaps

Array = jax.Array
PyTree = Any


State = TypeVar("State", bound=DiffusionState)
"""The decoder's own state; subclasses add fields to it."""


@dataclasses.dataclass(frozen=True)
class DiffusionDecoder(Decoder[DiffusionState]):
    """A masked-diffusion decoder. Static and hashable: pure functions `empty`, `prefill` and `step`, see `Decoder`.

    Blocks are finished from left to right (semi-autoregressive); a single block as long as the canvas has no order.
    Blocks count from the end of a row's prompt. Open positions may lie anywhere after it, also between known ones.

    A drawn token is `argmax(log p / temperature + g)`. Its noise depends on the row's key, its position and the pass
    over its block, so neither the batch nor the mesh changes it.

    Attributes:
      target: the model; it sees the whole canvas, in both directions.
      mask_id: the id of an open position. It is never predicted.
      policy: decides what to commit.
      cache: decides what to recompute.
      block_length: W.
      shift: whether the model's output at position i - 1 is for position i (Dream), rather than the output at i
        (LLaDA).
      cfg_scale: classifier-free guidance: logits are `u + (1 + cfg_scale)(c - u)`, where u are the logits without the
        given tokens (LLaDA's `generate`). A pass then reads two canvases per row. 0 is off.
      mesh: keeps the state on its shardings: rows over `data`, the cache's heads over `model`, its slots over
        `context`.
      never: further ids that are not predicted (LLaDA's `logits_eos_inf`).
      doubted: ids that are predicted, but have probability 0 for a policy, which sees the distribution without them
        (LLaDA's `confidence_eos_eot_inf`).
      warped: whether confidences are probabilities after temperature and filters, as in the samplers of Dream, SDAR,
        TraDo, LLaDA 2 and Fast-dLLM v2, or the model's own, as in LLaDA's. A policy may decide this itself
        (`Unmask.warped`).
      growth: with a cache, the factor between the static sizes of a pass, each of which is a program. 0: there is one
        size, as wide as any pass.
    """

    target: LM
    mask_id: int
    policy: Unmask = Threshold()
    cache: Cache = NoCache()
    block_length: int = 32
    shift: bool = False
    cfg_scale: float = 0.0
    mesh: jax.sharding.Mesh | None = None
    never: tuple[int, ...] = ()
    doubted: tuple[int, ...] = ()
    warped: bool = False
    growth: int = 2

    def checked(self) -> Self:
        """Itself.

        Raises:
          ValueError: for a mask id outside the vocabulary, an empty block, a growth of 1, or if guidance or an editing
            policy is combined with a cache.
        """
        if not 0 <= self.mask_id < self.target.vocab_size:
            raise ValueError(f"mask_id {self.mask_id} is outside the vocabulary of {self.target.vocab_size} tokens")
        if self.block_length < 1:
            raise ValueError(f"block_length must be at least 1, got {self.block_length}")
        if self.policy.width not in (0, self.block_length):
            raise ValueError(
                f"this {type(self.policy).__name__} is for blocks of {self.policy.width}, not of {self.block_length}: set the "
                "block length"
            )
        if not self.cfg_scale >= 0:
            raise ValueError(f"cfg_scale must be at least 0, got {self.cfg_scale}")
        if self.growth < 0 or self.growth == 1:
            raise ValueError(f"growth must be 0 or at least 2, got {self.growth}")
        outside = [i for i in (*self.never, *self.doubted) if not 0 <= i < self.target.vocab_size]
        if outside:
            raise ValueError(f"id {outside[0]} is outside the vocabulary of {self.target.vocab_size} tokens")
        if self.cache.chooses and not hasattr(self.target, "values"):
            raise ValueError(
                f"{type(self.target).__name__} does not show its layers' values, by which this cache chooses: leave share out"
            )
        if self.policy.edits and self.cache.keeps:
            raise ValueError(
                f"{type(self.policy).__name__} needs predictions for known tokens too, which a cache leaves out: choose the "
                "cache none"
            )
        if self.cfg_scale and self.cache.keeps:
            raise ValueError("cfg_scale reads a second canvas, which has no cache yet: choose the cache none")
        return self

    @property
    def fills_in(self) -> bool:
        return True

    @property
    def obeys(self) -> bool:
        """See `Decoder.obeys`."""
        return True

    def buffer(self, needed: int) -> int:
        """See `Decoder.buffer`: a pass may be as wide as the buffer."""
        return -(-needed // 32) * 32

    @property
    def costliest(self) -> Self:
        """See `Decoder.costliest`: every pass is as wide as any."""
        return dataclasses.replace(self, growth=0)

    @property
    def span(self) -> int:
        """How many positions the active block has."""
        return self.block_length

    def check_row(self, prompt: np.ndarray, limit: int) -> None:
        """See `Decoder.check_row` and `Unmask.room`."""
        opened = np.flatnonzero(np.isin(prompt, (self.mask_id, OPEN)))
        count = limit - int(opened[0] if len(opened) else len(prompt))
        if count < self.policy.room:
            raise ValueError(
                f"the unmask policy looks for an answer up to place {self.policy.room - 1} of the new text, which has {count} "
                f"places: ask for at least {self.policy.room} new tokens, or say where else the answer is"
            )

    @property
    def strict(self) -> bool:
        """See `Guess.strict`."""
        return False

    @property
    def rounded(self) -> int:
        """See `Guess.rounded`."""
        return 0

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> DiffusionState:
        """See `Decoder.empty`."""
        capacity = rounded(self.mesh, "slots", capacity)
        return self._constrain(self._empty(params, batch, capacity, cache_dtype, eos_width))

    def _empty(self, params, batch, capacity, cache_dtype, eos_width) -> DiffusionState:
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        return DiffusionState.blank(
            batch,
            capacity,
            self.span,
            eos_width,
            fill=self.mask_id,
            reached=zeros(),
            step=zeros(),
            entry=zeros(),
            memory=self.blank(batch, capacity),
            opened=zeros(capacity) > 0,
            fresh=zeros(capacity) > 0,
            cache=self._init_cache(params, batch, capacity, cache_dtype),
        )

    def blank(self, batch: int, capacity: int) -> PyTree:
        """The memory of rows that enter a block."""
        return self.policy.init(batch, capacity if self._lasts else self.span, self.target.vocab_size)

    @property
    def _lasts(self) -> bool:
        return self.policy.lasting

    def _init_cache(self, params, batch, capacity, dtype):
        if not self.cache.keeps:
            return None
        dtype = jax.tree.leaves(params["target"])[0].dtype if dtype is None else dtype
        if self.cache.chooses:
            return layerwise.begin(self.target, params["target"], batch, capacity, dtype)
        return self.target.init_cache(batch, capacity, dtype)

    def prefill(self, params: PyTree, state: DiffusionState, prompts: Prompts) -> DiffusionState:
        """See `Decoder.prefill`: every position from a prompt's end to its limit is open, and so are open spans of the prompt.

        Blocks begin at a prompt's first open position. If any part of a prompt is read, it is read in one pass. Only a
        row's temperature, top-k, top-p and min-p are used.
        """
        count, size = prompts.tokens.shape
        capacity, lengths = state.tokens.shape[1], jnp.asarray(prompts.lengths)
        tokens = jnp.where(prompts.tokens == OPEN, self.mask_id, prompts.tokens)
        dtype = next((leaf.dtype for leaf in jax.tree.leaves(state.cache)), None)
        fresh = self.empty(params, count, capacity, dtype, state.eos.shape[1])
        given = jnp.arange(min(size, capacity))[None] < lengths[:, None]
        canvas = fresh.tokens.at[:, : given.shape[1]].set(jnp.where(given, tokens[:, : given.shape[1]], self.mask_id))
        fresh = self._limited(fresh, jnp.clip(prompts.limit, lengths, capacity))
        first = first_open(canvas, fresh.limit, self.mask_id)
        fresh = dataclasses.replace(
            fresh,
            tokens=canvas,
            length=first,
            reached=first,
            finish=jnp.where(first < fresh.limit, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
            key=prompts.keys,
            prompt_length=first,
            eos=prompts.ends(state.eos.shape[1]),
            sampling=prompts.sampling,
            opened=(canvas == self.mask_id) & (jnp.arange(capacity)[None] < fresh.limit[:, None]),
        )
        fresh = dataclasses.replace(fresh, entry=self._entry(fresh))
        return self._read_prompts(params, fresh, tokens, lengths)

    def _limited(self, state: State, limit: Array) -> State:
        """Rows whose texts end at `limit` `[B]`."""
        return dataclasses.replace(state, limit=limit)

    def _end(self, state: DiffusionState) -> Array:
        """Where texts end `[B]`: at the canvas's end, unless the canvas is filled beyond the text."""
        return state.limit

    def _read_prompts(self, params, fresh, prompts, lengths) -> DiffusionState:
        """Rows with what is computed for their prompts before the first step: nothing, because that step writes all of
        a cache.
        """
        return fresh

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Decoder.needs`."""
        return ("target", *self.policy.needs)

    def axes(self, state: State) -> State:
        """Logical axis names of every leaf of the state."""
        axes = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)
        if state.cache is None:
            return axes
        if self.cache.chooses:
            return dataclasses.replace(axes, cache=layerwise.axes_of(self.target, state.cache))
        return dataclasses.replace(axes, cache=self.target.cache_axes(state.cache))

    def _constrain(self, state: State) -> State:
        return constrain(self.mesh, self.axes(state), state)

    def _masked(self, state: DiffusionState) -> tuple[Array, Array]:
        """Positions of the active block `[B, W]`, and which of them are open."""
        at = self._start(state)[:, None] + jnp.arange(self.span)[None]
        return at, (block_of(state.tokens, at) == self.mask_id) & (at < state.limit[:, None])

    def _start(self, state: DiffusionState) -> Array:
        """Where the active block begins `[B]`."""
        return state.prompt_length + (state.reached - state.prompt_length) // self.span * self.span

    def _entry(self, state: DiffusionState) -> Array:
        """The number of positions `[B]` of the active block for which a policy's schedule is made."""
        return self._masked(state)[1].sum(axis=1)

    @on_mesh
    def step(self, params: PyTree, state: State) -> tuple[State, DiffusionInfo]:
        """One forward pass: every live row commits at least one token."""
        return self._advance(params, state, *self._active(state))  # type: ignore[return-value]

    def _active(self, state: DiffusionState) -> tuple[Array, Array]:
        """Positions of the active block, and which of them a pass may commit."""
        at, masked = self._masked(state)
        return at, masked & ~state.done[:, None]

    def _advance(self, params, state, at, masked):
        storing = self._storing(state, at)
        guess, state = self._predict(params, state, at, masked)
        guess = dataclasses.replace(guess, weights=params.get("unmask"))
        with jax.named_scope("unmask"):
            choice, memory = self.policy(guess, state.memory)
            failed = jnp.any(masked & (guess.tokens < 0), axis=1)
            idle = self.policy.idle
            commit = choice.commit & masked if idle else at_least_one(choice.commit, choice.score, masked)
            commit = self._seeded(state, masked, commit) & ~failed[:, None]
            if choice.edit is not None:
                choice = dataclasses.replace(choice, edit=choice.edit & guess.committed & ~storing[:, None])
            if choice.stay is not None:
                choice = dataclasses.replace(choice, stay=choice.stay & ~storing)
            commit, choice = fitted(state, self._gaps(state), at, self._view(state, at), commit, choice)
        return self._commit(state, at, masked, commit, choice, memory, failed), DiffusionInfo(at[:, 0], commit, choice)

    def _storing(self, state, at) -> Array:
        """In which rows the pass reads no active block `[B]`, but only stores a finished one."""
        return jnp.zeros_like(state.done)

    def _seeded(self, state, masked, commit):
        """The commits, if a pass that enters a block may have to commit only its first token."""
        if not (self.shift and self.cache.seeds):
            return commit
        first = jnp.arange(masked.shape[1])[None] == jnp.argmax(masked, axis=1)[:, None]
        return jnp.where((state.step == 0)[:, None], masked & first, commit)

    def _predict(self, params, state, at, masked) -> tuple[Guess, DiffusionState]:
        """The model's predictions for the active block, and the state after that pass."""
        if not self.policy.whole:
            with jax.named_scope("target"):
                logits, _, state = self._read(params, state, at, masked)
            with jax.named_scope("predict"):
                return self._guess(state, at, masked, logits), state
        view = self._view(state, at)
        after = self._start(state) + self.span
        open_now = (block_of(state.tokens, view) == self.mask_id) & (view < state.limit[:, None]) & ~state.done[:, None]
        with jax.named_scope("target"):
            logits, read, state = self._read(params, state, view, open_now & (view < after[:, None]))
        with jax.named_scope("predict"):
            seen = self._guess(state, view, open_now, logits)
            slots = at - view[:, :1]
            guess = self._guess(state, at, masked, jnp.take_along_axis(logits, slots[:, :, None], axis=1, mode="clip"))
            overview = Overview(
                at=view,
                tokens=seen.tokens,
                log_probs=seen.log_probs,
                log_own=seen.log_own,
                noise=seen.noise,
                read=read,
                known=seen.committed,
                open=open_now & read,
                masked=open_now,
                ends=jnp.any(seen.tokens[:, :, None] == state.eos[:, None], axis=2),
                place=view - state.prompt_length[:, None],
                after=after,
                passes=state.stats.steps,
                blocks=jnp.maximum(self._blocks(state), 1),
            )
        return dataclasses.replace(guess, overview=overview), state

    def _view(self, state, at) -> Array:
        """The positions `[B, N]` of an overview; they are consecutive."""
        return jnp.broadcast_to(jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None], state.tokens.shape)

    def _blocks(self, state) -> Array:
        """The number of blocks of each row `[B]`."""
        return -(-(state.limit - state.prompt_length) // self.block_length)

    def _read(self, params, state, at, masked) -> tuple[Array, Array, DiffusionState]:
        """Logits `[B, W, V]` of these positions, which of them were read, and the state with its cache after that pass.

        Ids that are never predicted have no logits. Logits are garbage where nothing is open; `masked` positions are
        read in any case.
        """
        source = jnp.maximum(at - 1, 0) if self.shift else at
        read = at < state.limit[:, None]
        if self.cache.keeps:
            features, cache, active = self._recompute(params["target"], state, at, source, masked)
            read = read & block_of(active, source)
        else:
            features, cache = self._whole(params["target"], state, source), None
        logits = self.target.unembed(params["target"], features)
        if self.cfg_scale:
            blind = dataclasses.replace(state, tokens=jnp.where(state.opened, state.tokens, self.mask_id))
            without = self.target.unembed(params["target"], self._whole(params["target"], blind, source))
            logits = without + (1 + self.cfg_scale) * (logits - without)
        return self._possible(state, at, logits), read, dataclasses.replace(state, cache=cache)

    def _possible(self, state, at, logits):
        """Logits `[B, W, V]` of positions without what is never predicted, and what the rows' constraints forbid there."""
        never = self.never if self.policy.sees_mask else (self.mask_id, *self.never)
        logits = logits.at[:, :, jnp.asarray(never, jnp.int32)].set(-jnp.inf)
        gaps = self._gaps(state)
        return filled(logits, fillings(state.sampling, gaps.never), gaps, at)

    def _gaps(self, state) -> Gaps:
        return gaps_of(state, self.mask_id, self._end(state), self.never)

    def _seen(self, state) -> Array:
        """The end `[B]` of the positions that a pass sees."""
        reach = self.policy.sees(state.memory)
        if reach is None:
            return state.limit
        return jnp.minimum(state.limit, self._start(state) + jnp.minimum(reach, state.tokens.shape[1]))

    def _whole(self, weights, state, source):
        """Features `[B, W, E]` from a pass over the whole canvas."""
        final = read_whole(self.target, weights, state.tokens, self._seen(state)).final
        return jnp.take_along_axis(final, source[:, :, None], axis=1, mode="clip")

    def _recompute(self, weights, state, at, source, masked):
        """Features `[B, W, E]` from a pass over the positions of the cache policy, the cache, and what was computed
        `[B, L]`.
        """
        size = state.tokens.shape[1]
        plan = self.policy.plan(self._noise(state, at), masked, state.step, state.entry)
        if plan is not None:
            masked = masked & (plan < at.shape[1])
            plan = put(jnp.full_like(state.tokens, size), at, masked, plan)
        if self.cache.chooses:
            return self._by_layer(weights, state, source)
        active, wide = self._asked(state, source, masked, plan)
        most = size if self.policy.whole else self.cache.most(self.span + 1, size)
        features, cache = read_drafts(
            self.target, weights, state.cache, state.tokens[:, None], active[:, None], self._seen(state), source,
            (*widths(self.span, most, self.growth), most), wide, self.cache.groups(self._canvas(state)[0]),
        )  # fmt: skip
        return features[:, 0], cache, active

    def _asked(self, state, source, masked, plan=None):
        """What a pass recomputes `[B, L]`, and in which rows that is everything `[B]`.

        It recomputes the cache policy's positions and those whose logits are read.
        """
        size = state.tokens.shape[1]
        canvas, real = self._canvas(state, plan)
        read = jax.vmap(lambda source, masked: jnp.zeros((size,), bool).at[source].max(masked, mode="drop"))(
            source, masked
        )
        active = (self.cache.active(canvas) | read | (canvas.passes == 0)[:, None]) & real
        return active, jnp.all(active == real, axis=1) & ~state.done

    def _by_layer(self, weights, state, source):
        """The same for a cache policy that lets each layer choose."""
        canvas, real = self._canvas(state)
        must = (self.cache.active(canvas) | (canvas.passes == 0)[:, None]) & real
        new = real & (canvas.at >= state.prompt_length[:, None])
        features, cache = layerwise.read_by_layer(
            self.target, weights, state.cache, state.tokens, must, new, self.cache.chooses, self._seen(state)
        )
        return jnp.take_along_axis(features, source[:, :, None], axis=1, mode="clip"), cache, real

    def _canvas(self, state, plan=None):
        """The view of the canvas for a cache policy, and which positions exist `[B, L]`."""
        everywhere = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None]
        real = (everywhere < state.limit[:, None]) & ~state.done[:, None]
        start = self._start(state)
        canvas = Canvas(
            masked=(state.tokens == self.mask_id) & real,
            fresh=state.fresh,
            inside=(everywhere >= start[:, None]) & (everywhere < start[:, None] + self.span) & real,
            prompt_length=state.prompt_length,
            start=start,
            step=state.step,
            passes=state.stats.steps,
            reach=self._reach(state),
            width=self.span,
            plan=plan,
        )
        return canvas, real

    def _reach(self, state) -> Array:
        """The end of the positions `[B]` that a pass may commit."""
        if not self.policy.whole:
            return jnp.minimum(state.limit, self._start(state) + self.span)
        blocks = self.policy.blocks_open(state.memory)
        return state.limit if blocks is None else jnp.minimum(state.limit, state.prompt_length + blocks * self.span)

    def _pass(self, state) -> Array:
        """The number `[B]` of a pass among those that may draw a position's token."""
        return state.stats.steps if self.policy.opens else state.step

    def _guess(self, state, at, masked, logits) -> Guess:
        live = ~state.done
        sampled = state.sampling.temperature > 0
        # position and pass decide the noise: no two draws share theirs, and the canvas's capacity does not matter
        keys = jax.vmap(jax.random.fold_in)(state.key, self._pass(state))
        tokens = logits.at[:, :, self.mask_id].set(-jnp.inf) if self.policy.sees_mask else logits

        def draw():
            drawn = draws(warp(tokens, state.sampling, live), keys, at, sampled)
            return jnp.where(sampled[:, None], drawn, best(tokens))

        dist = logits.at[:, :, jnp.asarray(self.doubted)].set(-jnp.inf) if self.doubted else logits
        if self.warped if self.policy.warped is None else self.policy.warped:
            dist = self._warp(dist, state)
        return Guess(
            tokens=jax.lax.cond(jnp.any(live & sampled), draw, lambda: best(tokens)),
            log_probs=_log_probs(dist),
            masked=masked,
            committed=self._committed(state, at),
            step=state.step,
            entry=state.entry,
            noise=self._noise(state, at),
            sampled=sampled,
            current=block_of(state.tokens, at),
            log_own=jax.nn.log_softmax(logits, axis=-1),
            strict=self.strict,
            rounded=self.rounded,
            mask_id=self.mask_id,
        )

    def _warp(self, dist, state) -> Array:
        """Scores `[B, W, V]` after temperature and filters; in greedy rows after filters only, as in Dream's sampler."""
        heat = jnp.where(state.sampling.temperature > 0, state.sampling.temperature, 1.0)
        return warp(dist, state.sampling.replace(temperature=heat), ~state.done)

    def _noise(self, state, at):
        """Uniforms `[B, W]` of these positions and of the pass; for an `ordered` policy, of the positions alone."""
        step = jnp.zeros_like(state.step) if self.policy.ordered else self._pass(state)
        return uniform(jax.vmap(jax.random.fold_in)(state.key, step), at, CHOOSE)

    def _committed(self, state, at):
        """Which of these positions hold a token that is not the prompt's."""
        known = block_of(state.opened, at) & (block_of(state.tokens, at) != self.mask_id)
        return known & (at < state.limit[:, None])

    def _write(self, state, at, masked, commit, choice, working) -> tuple[Array, Array]:
        """The canvases after a pass, and which rows have not finished their block `[B]`."""
        tokens = put(state.tokens, at, commit, choice.tokens)
        blank = jnp.asarray(self.mask_id, jnp.int32)
        again = jnp.zeros_like(working)
        if choice.reopen is not None:
            reopen = choice.reopen & working[:, None]
            tokens = put(tokens, at, reopen, jnp.broadcast_to(blank, at.shape))
            again = again | reopen.any(axis=1)
        if choice.edit is not None:
            tokens = put(tokens, at, choice.edit & working[:, None], choice.tokens)
        if choice.stay is not None:
            again = again | (choice.stay & working)
        view = self._view(state, at)
        if choice.besides is not None:
            tokens = put(tokens, view, (choice.besides >= 0) & working[:, None], choice.besides)
        if choice.undo is not None:
            undo = choice.undo & working[:, None]
            tokens = put(tokens, view, undo, jnp.broadcast_to(blank, view.shape))
            again = again | undo.any(axis=1)
        left = masked & (block_of(tokens, at) == self.mask_id) & (at < state.limit[:, None])
        return tokens, left.any(axis=1) | again

    def _commit(self, state, at, masked, commit, choice, memory, failed) -> DiffusionState:
        live = ~state.done
        # not in a pass that only stores; if all positions count, those to write may lie before the block, and an editing policy
        # may find nothing open
        working = live & ~failed & (masked.any(axis=1) | self._lasts | self.policy.edits)
        if choice.end is not None:
            limit = jnp.where(working, jnp.minimum(state.limit, choice.end), state.limit)
            state = dataclasses.replace(state, limit=limit)
        tokens, unfinished = self._write(state, at, masked, commit, choice, working)
        reached = first_open(tokens, state.limit, self.mask_id)
        if self.policy.revises:  # no token of an unfinished block is final
            reached = jnp.where(unfinished, state.reached, reached)
        reached = jnp.where(live, reached, state.reached)
        entered = live & ~unfinished
        written = (tokens != state.tokens) & (tokens != self.mask_id)
        everywhere = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        count = jnp.minimum((written & (everywhere < self._end(state)[:, None])).sum(axis=1), self.span)
        steps = live.astype(jnp.int32)
        stats = Stats(
            state.stats.steps + steps,
            state.stats.accepted + steps[:, None] * (jnp.arange(self.span + 1)[None] == count[:, None]),
        )
        # if tokens of finished blocks may change, an end of text counts once all of the canvas is known
        changes = self._lasts and self.policy.revises
        final = jnp.where(reached < state.limit, 0, reached) if changes else reached
        end = ends_at(tokens, state.opened, jnp.minimum(final, self._end(state)), state.eos)
        ended = live & (end < final)
        finish = finish_rows(state, reached, ended, failed)
        # a row shows only final tokens
        shown = jnp.where(finish == Finish.RUNNING, state.length, reached) if changes else reached
        shown = jnp.minimum(shown, self._end(state))
        blank = memory if self._lasts else self.blank(*tokens.shape)
        kept = lambda new, blank: jnp.where(jnp.expand_dims(entered, tuple(range(1, new.ndim))), blank, new)
        state = dataclasses.replace(
            state,
            tokens=tokens,
            length=jnp.where(ended, end + 1, jnp.where(live, shown, state.length)),
            reached=reached,
            finish=finish,
            stats=stats,
            fresh=tokens != state.tokens,
            step=jnp.where(entered, 0, state.step + steps),
            memory=jax.tree.map(kept, memory, blank),
        )
        return self._constrain(dataclasses.replace(state, entry=jnp.where(entered, self._entry(state), state.entry)))


def _log_probs(logits) -> Array:
    """Log-probabilities `[B, W, V]`, all of them -inf where nothing is left."""
    return jnp.where(jnp.any(logits > -jnp.inf, axis=-1, keepdims=True), jax.nn.log_softmax(logits, axis=-1), -jnp.inf)
