"""The masked-diffusion step: read the canvas, guess the active block, commit what the policy is sure of.

In the shape descriptions `B` denotes rows, `R` inserted rows, `L` the canvas, `W` the block length, `V` the vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.diffusion.unmask.base import Choice, Guess, Unmask
from specjax.diffusion.unmask.threshold import Threshold
from specjax.lm import LM, Block, Wants
from specjax.sampling import Sampling
from specjax.sampling.noise import gumbel, uniform
from specjax.sampling.warp import warp
from specjax.state import Finish, Stats

Array = jax.Array
PyTree = Any

DRAW, CHOOSE = 3, 4  # purposes of noise, beside those of `specjax.sampling.noise`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionState:
    """The rows being decoded. The leading fields are those of `specjax.state.DecodeState`.

    Attributes:
      tokens: `[B, L]` int32, the canvas: known tokens, and the mask id at open positions below `limit`.
      length: `[B]` int32, the known tokens before the first open position.
      finish: `[B]` int32, a `Finish` value.
      key: `[B]` typed row keys.
      stats: forward passes, and how many of them committed 0, 1, ... W tokens.
      prompt_length: `[B]` int32, where the first block begins.
      limit: `[B]` int32, the end of the canvas.
      eos: `[B, K]` int32, ids that end a row; -1 padded.
      sampling: the rows' sampling parameters.
      block: `[B]` int32, the active block.
      step: `[B]` int32, passes over it so far.
      entry: `[B]` int32, how many open positions it had when it began.
      memory: the policy's, of the active block.
    """

    tokens: Array
    length: Array
    finish: Array
    key: Array
    stats: Stats
    prompt_length: Array
    limit: Array
    eos: Array
    sampling: Sampling
    block: Array
    step: Array
    entry: Array
    memory: PyTree

    @property
    def done(self) -> Array:
        """`[B]` bool."""
        return self.finish != Finish.RUNNING


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionInfo:
    """What one step did; nothing here is needed by the next one.

    Attributes:
      start: `[B]` int32, the active block's first position.
      committed: `[B, W]` bool, which of its positions were committed.
      choice: the policy's.
    """

    start: Array
    committed: Array
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Diffusion:
    """A masked-diffusion decoder. Static and hashable: pure functions `empty`, `insert` and `step`, none of them jitted.

    Blocks are finished from left to right (semi-autoregressive); one block as long as the canvas has no order. Blocks count
    from the end of a row's prompt; open positions may lie anywhere after it, between known ones too.

    A drawn token is `argmax(log p / temperature + g)` with noise of the row's key, its position and the pass over its block,
    so neither the batch nor the mesh changes it.

    Attributes:
      target: the model; it sees the whole canvas, in both directions.
      mask_id: the id of an open position. It is never predicted.
      policy: what to commit.
      block_length: W.
      shift: the model's output at position i - 1 is for position i (Dream), not that at i (LLaDA).
      mesh: as the protocol asks; None.
    """

    target: LM
    mask_id: int
    policy: Unmask = Threshold()
    block_length: int = 32
    shift: bool = False
    mesh: jax.sharding.Mesh | None = None

    @property
    def slack(self) -> int:
        """Canvas slots needed beyond the longest text: none."""
        return 0

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> DiffusionState:
        """A state of finished rows, to be filled by `insert`; see `Speculative.empty`."""
        zeros = jnp.zeros((batch,), jnp.int32)
        return DiffusionState(
            tokens=jnp.full((batch, capacity), self.mask_id, jnp.int32),
            length=zeros,
            finish=zeros + Finish.LENGTH,
            key=jax.vmap(lambda i: jax.random.key(i, impl="threefry2x32"))(zeros),
            stats=Stats(zeros, jnp.zeros((batch, self.block_length + 1), jnp.int32)),
            prompt_length=zeros,
            limit=zeros,
            eos=jnp.full((batch, eos_width), -1, jnp.int32),
            sampling=Sampling.make(batch),
            block=zeros,
            step=zeros,
            entry=zeros,
            memory=self.policy.init(batch, self.block_length, self.target.vocab_size),
        )

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
          width: not used: nothing is prefilled.
        """
        count, size = prompts.shape
        capacity = state.tokens.shape[1]
        fresh = self.empty(params, count, capacity, eos_width=state.eos.shape[1])
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
        )
        fresh = dataclasses.replace(fresh, entry=self._masked(fresh)[1].sum(axis=1))
        return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), state, fresh)

    def _masked(self, state: DiffusionState) -> tuple[Array, Array]:
        """Positions of the active block `[B, W]`, and which of them are open."""
        at = (state.prompt_length + state.block * self.block_length)[:, None] + jnp.arange(self.block_length)[None]
        tokens = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        return at, (tokens == self.mask_id) & (at < state.limit[:, None])

    def step(self, params: PyTree, state: DiffusionState) -> tuple[DiffusionState, DiffusionInfo]:
        """One forward pass: every live row commits at least one token."""
        at, masked = self._masked(state)
        masked = masked & ~state.done[:, None]
        with jax.named_scope("target"):
            logits = self._read(params, state, at)
        with jax.named_scope("unmask"):
            guess = self._guess(state, at, masked, logits)
            choice, memory = self.policy(guess, state.memory)
            commit = at_least_one(choice.commit, choice.score, masked)
        failed = jnp.any(masked & ~jnp.isfinite(logits).any(axis=-1), axis=1)
        commit = commit & ~failed[:, None]
        return self._commit(state, at, masked, commit, choice, memory, failed), DiffusionInfo(at[:, 0], commit, choice)

    def _read(self, params, state, at) -> Array:
        """Logits `[B, W, V]` of the active block, without the mask id."""
        batch, size = state.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (batch, size))
        visible = (positions < state.limit[:, None])[:, None, :]
        block = Block(state.tokens, positions, jnp.zeros((batch,), jnp.int32), visible, causal=False)
        output = self.target(params["target"], block, None, wants=Wants(final=True))
        source = jnp.maximum(at - 1, 0) if self.shift else at
        features = jnp.take_along_axis(output.final, source[:, :, None], axis=1, mode="clip")
        logits = self.target.unembed(params["target"], features)
        return logits.at[:, :, self.mask_id].set(-jnp.inf)

    def _guess(self, state, at, masked, logits) -> Guess:
        live = ~state.done
        sampled = state.sampling.temperature > 0
        # one number a position and pass: no two draws share their noise
        moment = at + state.tokens.shape[1] * (1 + state.step[:, None])

        def draw():
            scores = warp(logits, state.sampling, live)
            noise = gumbel(state.key, moment, logits.shape[-1], DRAW)
            return jnp.argmax(jnp.where(sampled[:, None, None], scores + noise, logits), axis=-1)

        tokens = jax.lax.cond(jnp.any(live & sampled), draw, lambda: jnp.argmax(logits, axis=-1))
        return Guess(
            tokens=tokens.astype(jnp.int32),
            log_law=jax.nn.log_softmax(logits, axis=-1),
            masked=masked,
            step=state.step,
            entry=state.entry,
            noise=uniform(state.key, moment, CHOOSE),
        )

    def _commit(self, state, at, masked, commit, choice, memory, failed) -> DiffusionState:
        live = ~state.done
        tokens = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
            state.tokens, jnp.where(commit, at, state.tokens.shape[1]), choice.tokens
        )
        length = jnp.where(live, first_open(tokens, state.limit, self.mask_id), state.length)
        entered = live & ~jnp.any(masked & ~commit, axis=1)
        block = jnp.where(live, (length - state.prompt_length) // self.block_length, state.block)
        count = commit.sum(axis=1)
        steps = live.astype(jnp.int32)
        stats = Stats(
            state.stats.steps + steps,
            state.stats.accepted + steps[:, None] * (jnp.arange(self.block_length + 1)[None] == count[:, None]),
        )
        end = ends_at(tokens, state.prompt_length, length, state.eos)
        finish = jnp.where(length >= state.limit, Finish.LENGTH, Finish.RUNNING)
        finish = jnp.where(end < length, Finish.EOS, finish)
        finish = jnp.where(failed, Finish.ERROR, finish)
        blank = self.policy.init(tokens.shape[0], self.block_length, self.target.vocab_size)
        kept = lambda new, blank: jnp.where(jnp.expand_dims(entered, tuple(range(1, new.ndim))), blank, new)
        state = dataclasses.replace(
            state,
            tokens=tokens,
            length=jnp.where(live & (finish == Finish.EOS), end + 1, length),
            finish=jnp.where(live, finish, state.finish).astype(jnp.int32),
            stats=stats,
            block=block,
            step=jnp.where(entered, 0, state.step + steps),
            memory=jax.tree.map(kept, memory, blank),
        )
        return dataclasses.replace(state, entry=jnp.where(entered, self._masked(state)[1].sum(axis=1), state.entry))


def diffusion(
    target: LM, mask_id: int, policy: Unmask | None = None, *, block_length: int = 32, shift: bool = False
) -> Diffusion:
    """A masked-diffusion decoder from its parts.

    Raises:
      ValueError: on a mask id outside the vocabulary or an empty block.
    """
    if not 0 <= mask_id < target.vocab_size:
        raise ValueError(f"mask_id {mask_id} is outside the vocabulary of {target.vocab_size} tokens")
    if block_length < 1:
        raise ValueError(f"block_length must be at least 1, got {block_length}")
    return Diffusion(target, mask_id, policy or Threshold(), block_length, shift)


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


def ends_at(tokens: Array, start: Array, end: Array, eos: Array) -> Array:
    """The first position `[B]` in `[start, end)` that holds one of `eos` `[B, K]`; L where there is none."""
    size = tokens.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)[None]
    hit = jnp.any(tokens[:, :, None] == eos[:, None, :], axis=2) & (at >= start[:, None]) & (at < end[:, None])
    return jnp.min(jnp.where(hit, at, size), axis=1)
