"""The masked-diffusion step: read the canvas, guess the active block, commit what the policy is sure of.

In the shape descriptions `B` denotes rows, `R` inserted rows, `L` the canvas, `W` the block length, `V` the vocabulary.
"""

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp

from specjax.decoder import Decoder, check_rows
from specjax.diffusion.cache.base import Cache, Canvas, positions_of, widths
from specjax.diffusion.cache.none import NoCache
from specjax.diffusion.unmask.base import Choice, Guess, Unmask
from specjax.diffusion.unmask.threshold import Threshold
from specjax.kernels.verify import gumbel_argmax
from specjax.lm import LM, Block, Wants
from specjax.pretty import Pretty
from specjax.sampling import Sampling
from specjax.sampling.noise import keys_at, uniform
from specjax.sampling.sampler import best
from specjax.sampling.warp import warp
from specjax.sharding.ambient import on_mesh
from specjax.sharding.rules import constrain, rounded
from specjax.state import Finish, Rows, Stats, finish_rows

Array = jax.Array
PyTree = Any

DRAW, CHOOSE = 3, 4  # purposes of noise, beside those of `specjax.sampling.noise`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionState(Rows):
    """The rows of a diffusion decoder. `tokens` is the canvas, with the mask id at open positions below `limit`; `length` is
    how many tokens are known before the first open one. Blocks begin at `prompt_length`; the active one is that of `length`.

    Attributes:
      step: `[B]` int32, passes over the active block so far.
      entry: `[B]` int32, how many open positions it had when it began.
      memory: the unmask policy's, of the active block.
      opened: `[B, L]` bool, the positions that are not the prompt's: open at first.
      fresh: `[B, L]` bool, the positions that the last step committed.
      cache: keys and values of every position, as they were computed last; None without a cache.
    """

    step: Array
    entry: Array
    memory: PyTree
    opened: Array
    fresh: Array
    cache: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionInfo(Pretty):
    """What one step did; nothing here is needed by the next one.

    Attributes:
      start: `[B]` int32, the active block's first position.
      committed: `[B, W]` bool, which of its positions were committed.
      choice: the policy's.
    """

    start: Array
    committed: Array
    choice: Choice


State = TypeVar("State", bound=DiffusionState)
Kind = TypeVar("Kind")


@dataclasses.dataclass(frozen=True)
class Diffusion(Decoder):
    """A masked-diffusion decoder. Static and hashable: pure functions `empty`, `insert` and `step`, see `Decoder`.

    Blocks are finished from left to right (semi-autoregressive); one block as long as the canvas has no order. Blocks count
    from the end of a row's prompt; open positions may lie anywhere after it, between known ones too.

    A drawn token is `argmax(log p / temperature + g)` with noise of the row's key, its position and the pass over its block,
    so neither the batch nor the mesh changes it.

    Attributes:
      target: the model; it sees the whole canvas, in both directions.
      mask_id: the id of an open position. It is never predicted.
      policy: what to commit.
      cache: what to compute anew.
      block_length: W.
      shift: the model's output at position i - 1 is for position i (Dream), not that at i (LLaDA).
      cfg_scale: classifier-free guidance: logits are `u + (1 + cfg_scale)(c - u)`, where u are those without what was given
        (LLaDA's `generate`). A pass then reads two canvases a row. 0 is off.
      mesh: keeps the state on its shardings: rows over `data`, the cache's heads over `model`, its slots over `context`.
    """

    target: LM
    mask_id: int
    policy: Unmask = Threshold()
    cache: Cache = NoCache()
    block_length: int = 32
    shift: bool = False
    cfg_scale: float = 0.0
    mesh: jax.sharding.Mesh | None = None

    def checked(self) -> Self:
        """Itself.

        Raises:
          ValueError: on a mask id outside the vocabulary, an empty block, or guidance with a cache.
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
        if self.cfg_scale and self.cache.keeps:
            raise ValueError("cfg_scale reads a second canvas, which has no cache yet: choose the cache none")
        return self

    @property
    def fills_in(self) -> bool:
        return True

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
            self.block_length,
            eos_width,
            fill=self.mask_id,
            step=zeros(),
            entry=zeros(),
            memory=self.blank(batch),
            opened=zeros(capacity) > 0,
            fresh=zeros(capacity) > 0,
            cache=self._init_cache(params, batch, capacity, cache_dtype),
        )

    def blank(self, batch: int) -> PyTree:
        """The memory of rows that enter a block."""
        return self.policy.init(batch, self.block_length, self.target.vocab_size)

    def _init_cache(self, params, batch, capacity, dtype):
        if not self.cache.keeps:
            return None
        return self.target.init_cache(
            batch, capacity, jax.tree.leaves(params["target"])[0].dtype if dtype is None else dtype
        )

    @on_mesh
    def insert(
        self,
        params: PyTree,
        state: DiffusionState,
        rows: Array,
        prompts: Array,
        lengths: Array,
        row_keys: Array,
        *,
        limit: Array,
        sampling: Sampling,
        eos: Array | None = None,
        width: int | None = None,
    ) -> DiffusionState:
        """Puts new prompts into rows, whatever those held, and opens every position from a prompt's end to its limit.

        Args:
          params: the parameters.
          state: of B rows.
          rows: `[R]` int32, where they go; B or more drops one (padding).
          prompts: `[R, P]` int32. Mask ids in them, and those only, are filled in as well: open spans.
          lengths: `[R]` int32, how much of a prompt is given; blocks begin at its first open position.
          row_keys: `[R]` typed keys (`specjax.sampling.row_keys`).
          limit: `[R]` int32, where the canvas ends, at most L.
          sampling: of R rows; of the options temperature, top-k, top-p and min-p are used.
          eos: `[R, K]` int32, -1 padded, or None.
          width: not used: what is read of a prompt, if anything, is read in one pass.

        Raises:
          ValueError: outside jit, where a row does not fit, see `check_rows`.
        """
        count, size = prompts.shape
        batch, capacity = state.tokens.shape
        check_rows(self, capacity, prompts, lengths, limit, rows, batch)
        dtype = next((leaf.dtype for leaf in jax.tree.leaves(state.cache)), None)
        fresh = self.empty(params, count, capacity, dtype, state.eos.shape[1])
        given = jnp.arange(min(size, capacity))[None] < lengths[:, None]
        canvas = fresh.tokens.at[:, : given.shape[1]].set(jnp.where(given, prompts[:, : given.shape[1]], self.mask_id))
        limit = jnp.clip(limit, lengths, capacity)
        first = first_open(canvas, limit, self.mask_id)
        fresh = dataclasses.replace(
            fresh,
            tokens=canvas,
            length=first,
            finish=jnp.where(first < limit, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
            key=row_keys,
            prompt_length=first,
            limit=limit,
            eos=fresh.eos if eos is None else eos,
            sampling=sampling,
            opened=(canvas == self.mask_id) & (jnp.arange(capacity)[None] < limit[:, None]),
        )
        fresh = dataclasses.replace(fresh, entry=self._masked(fresh)[1].sum(axis=1))
        fresh = self._read_prompts(params, fresh, prompts, lengths)
        return self._constrain(state.place(rows, fresh, self.axes(state)))

    def _read_prompts(self, params, fresh, prompts, lengths) -> DiffusionState:
        """Rows with what is computed of their prompts before the first step: nothing, since that writes all of a cache."""
        return fresh

    def axes(self, state: DiffusionState) -> DiffusionState:
        """Logical axis names of every leaf of the state."""
        axes = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)
        return axes if state.cache is None else dataclasses.replace(axes, cache=self.target.cache_axes(state.cache))

    def _constrain(self, state: State) -> State:
        return constrain(self.mesh, self.axes(state), state)

    def _masked(self, state: DiffusionState) -> tuple[Array, Array]:
        """Positions of the active block `[B, W]`, and which of them are open."""
        passed = (state.length - state.prompt_length) // self.block_length * self.block_length
        at = (state.prompt_length + passed)[:, None] + jnp.arange(self.block_length)[None]
        tokens = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        return at, (tokens == self.mask_id) & (at < state.limit[:, None])

    @on_mesh
    def step(self, params: PyTree, state: DiffusionState) -> tuple[DiffusionState, DiffusionInfo]:
        """One forward pass: every live row commits at least one token."""
        at, masked = self._masked(state)
        return self._advance(params, state, at, masked & ~state.done[:, None])

    def _advance(self, params, state, at, masked):
        guess, state = self._predict(params, state, at, masked)
        guess = dataclasses.replace(guess, weights=params.get("unmask"))
        with jax.named_scope("unmask"):
            choice, memory = self.policy(guess, state.memory)
            failed = jnp.any(masked & (guess.tokens < 0), axis=1)
            commit = at_least_one(choice.commit, choice.score, masked) & ~failed[:, None]
        return self._commit(state, at, masked, commit, choice, memory, failed), DiffusionInfo(at[:, 0], commit, choice)

    def _predict(self, params, state, at, masked) -> tuple[Guess, DiffusionState]:
        """What the model predicts for the active block, and the state after that pass."""
        with jax.named_scope("target"):
            logits, state = self._read(params, state, at, masked)
        with jax.named_scope("predict"):
            return self._guess(state, at, masked, logits), state

    def _read(self, params, state, at, masked) -> tuple[Array, DiffusionState]:
        """Logits `[B, W, V]` of the active block, without the mask id, and the state with its cache after that pass. Garbage
        where nothing is open."""
        source = jnp.maximum(at - 1, 0) if self.shift else at
        if self.cache.keeps:
            features, cache = self._recompute(params["target"], state, at, source, masked)
        else:
            features, cache = self._whole(params["target"], state, source)[0], None
        logits = self.target.unembed(params["target"], features)
        if self.cfg_scale:
            blind = dataclasses.replace(state, tokens=jnp.where(state.opened, state.tokens, self.mask_id))
            without = self.target.unembed(params["target"], self._whole(params["target"], blind, source)[0])
            logits = without + (1 + self.cfg_scale) * (logits - without)
        return self._without_mask(logits), dataclasses.replace(state, cache=cache)

    def _without_mask(self, logits):
        return logits.at[:, :, self.mask_id].set(-jnp.inf)

    def _whole(self, weights, state, source):
        """Features `[B, W, E]` from a pass over the whole canvas, and its keys and values."""
        output = self._final(weights, state.tokens, state.limit)
        return jnp.take_along_axis(output.final, source[:, :, None], axis=1, mode="clip"), output.delta

    def _final(self, weights, tokens, limit):
        """A pass over canvases `[B, L]`, of which the positions below `limit` `[B]` count; the output has `final`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        visible = (positions < limit[:, None])[:, None, :]
        block = Block(tokens, positions, jnp.zeros_like(limit), visible, causal=False)
        return self.target(weights, block, None, wants=Wants(final=True))

    def _recompute(self, weights, state, at, source, masked):
        """Features `[B, W, E]` from a pass over what the cache policy asks for, and the cache."""
        size = state.tokens.shape[1]
        everywhere = jnp.arange(size, dtype=jnp.int32)[None]
        real = (everywhere < state.limit[:, None]) & ~state.done[:, None]
        passes = state.stats.steps
        canvas = Canvas(
            masked=(state.tokens == self.mask_id) & real,
            fresh=state.fresh,
            inside=(everywhere >= at[:, :1]) & (everywhere <= at[:, -1:]) & real,
            prompt_length=state.prompt_length,
            start=at[:, 0],
            step=state.step,
            passes=passes,
            width=self.block_length,
        )
        read = jax.vmap(lambda source, masked: jnp.zeros((size,), bool).at[source].max(masked, mode="drop"))(
            source, masked
        )
        active = (self.cache.active(canvas) | read | (passes == 0)[:, None]) & real

        def part(width):
            at = positions_of(active, width)
            known = at < size
            clipped = jnp.minimum(at, size - 1)
            block = Block(
                jnp.take_along_axis(state.tokens, clipped, axis=1),
                clipped,
                state.limit,
                jnp.broadcast_to(known[:, None, :], (*at.shape, width)),
                unseen=active,
                causal=False,
            )
            output = self.target(weights, block, state.cache, wants=Wants(final=True))
            slot = jnp.take_along_axis(jnp.cumsum(active, axis=1) - 1, source, axis=1, mode="clip")
            features = jnp.take_along_axis(output.final, slot[:, :, None], axis=1, mode="clip")
            return features, self.target.commit(state.cache, output.delta, None, at)

        def whole():
            features, delta = self._whole(weights, state, source)
            return features, self.target.commit(state.cache, delta, None, jnp.zeros((active.shape[0],), jnp.int32))

        sizes = (*widths(self.block_length, size), size)
        branches = [*[lambda width=width: part(width) for width in sizes], whole]
        count = jnp.max(active.sum(axis=1))
        choice = (count > jnp.asarray(sizes)).sum()
        return jax.lax.switch(jnp.where(jnp.all(active == real), len(sizes), choice), branches)

    def _guess(self, state, at, masked, logits) -> Guess:
        live = ~state.done
        sampled = state.sampling.temperature > 0
        # position and pass decide the noise: no two draws share theirs, and the canvas's capacity does not matter
        keys = jax.vmap(jax.random.fold_in)(state.key, state.step)

        def draw():
            drawn = draws(warp(logits, state.sampling, live), keys, at, sampled)
            return jnp.where(sampled[:, None], drawn, best(logits))

        return Guess(
            tokens=jax.lax.cond(jnp.any(live & sampled), draw, lambda: best(logits)),
            log_law=jax.nn.log_softmax(logits, axis=-1),
            masked=masked,
            committed=jnp.take_along_axis(state.opened, at, axis=1, mode="clip")
            & (jnp.take_along_axis(state.tokens, at, axis=1, mode="clip") != self.mask_id)
            & (at < state.limit[:, None]),
            step=state.step,
            entry=state.entry,
            noise=uniform(keys, at, CHOOSE),
            sampled=sampled,
        )

    def _commit(self, state, at, masked, commit, choice, memory, failed) -> DiffusionState:
        live = ~state.done
        tokens = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
            state.tokens, jnp.where(commit, at, state.tokens.shape[1]), choice.tokens
        )
        unfinished = jnp.any(masked & ~commit, axis=1)
        if choice.reopen is not None:
            reopen = choice.reopen & (live & ~failed & masked.any(axis=1))[:, None]  # not in a pass that only stores
            tokens = jax.vmap(lambda row, at: row.at[at].set(self.mask_id, mode="drop"))(
                tokens, jnp.where(reopen, at, tokens.shape[1])
            )
            unfinished = unfinished | reopen.any(axis=1)
        if self.policy.ends:
            end = ends_at(tokens, state.opened, state.limit, state.eos)
            state = dataclasses.replace(state, limit=jnp.where(live, jnp.minimum(state.limit, end + 1), state.limit))
            unfinished = unfinished & jnp.any(masked & ~commit & (at < state.limit[:, None]), axis=1)
        length = first_open(tokens, state.limit, self.mask_id)
        if self.policy.revises:  # no token of an unfinished block is final
            length = jnp.where(unfinished, state.length, length)
        length = jnp.where(live, length, state.length)
        entered = live & ~unfinished
        count = commit.sum(axis=1)
        steps = live.astype(jnp.int32)
        stats = Stats(
            state.stats.steps + steps,
            state.stats.accepted + steps[:, None] * (jnp.arange(self.block_length + 1)[None] == count[:, None]),
        )
        end = ends_at(tokens, state.opened, length, state.eos)
        ended = live & (end < length)
        blank = self.blank(tokens.shape[0])
        kept = lambda new, blank: jnp.where(jnp.expand_dims(entered, tuple(range(1, new.ndim))), blank, new)
        state = dataclasses.replace(
            state,
            tokens=tokens,
            length=jnp.where(ended, end + 1, length),
            finish=finish_rows(state, length, ended, failed),
            stats=stats,
            fresh=tokens != state.tokens,
            step=jnp.where(entered, 0, state.step + steps),
            memory=jax.tree.map(kept, memory, blank),
        )
        entry = jnp.where(entered, self._masked(state)[1].sum(axis=1), state.entry)
        return self._constrain(dataclasses.replace(state, entry=entry))


def draws(scores: Array, keys: Array, at: Array, sampled: Array) -> Array:
    """Tokens `[B, W]` drawn from warped scores `[B, W, V]` with the noise of each row's key `[B]` and position `[B, W]`; the
    likeliest ones in rows that are not `sampled` `[B]`, and -1 where scores are not finite."""
    which = jnp.broadcast_to(jnp.arange(at.shape[1], dtype=jnp.int32)[None], at.shape)
    return gumbel_argmax(scores, keys_at(keys, at, DRAW), which, sampled)[0]


def widened(kind: type[Kind], value: Any, **more: Any) -> Kind:
    """A `kind`, which extends the dataclass of `value` by the fields `more`."""
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, **more)


def at_least_one(commit: Array, score: Array, masked: Array) -> Array:
    """The masked positions chosen `[B, W]`; where a row chose none, its surest one."""
    commit = commit & masked
    best = jnp.argmax(jnp.where(masked, score, -jnp.inf), axis=1)
    surest = masked & (jnp.arange(masked.shape[1])[None] == best[:, None])
    return jnp.where(commit.any(axis=1, keepdims=True), commit, surest)


def first_open(tokens: Array, limit: Array, mask_id: int) -> Array:
    """The first open position `[B]` of canvases `[B, L]`, `limit` where there is none."""
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.min(jnp.where((tokens == mask_id) & (at < limit[:, None]), at, limit[:, None]), axis=1)


def ends_at(tokens: Array, opened: Array, end: Array, eos: Array) -> Array:
    """The first of the `opened` positions `[B, L]` below `end` `[B]` that holds one of `eos` `[B, K]`; L without one."""
    size = tokens.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)[None]
    hit = jnp.any(tokens[:, :, None] == eos[:, None, :], axis=2) & opened & (at < end[:, None])
    return jnp.min(jnp.where(hit, at, size), axis=1)
