"""Block diffusion over canvases of random tokens (DiffusionGemma): no mask, and every token may change until its canvas
is final.

A canvas begins as random tokens. A pass predicts all of it. The sampler keeps the surest predictions, and the other
positions get new random tokens. The next pass sees a soft embedding of this one's distributions (self-conditioning).

A final canvas consists of the likeliest tokens of its last pass. It is read once more as text, causally, and its keys
and values are stored; the next canvas follows.

In the shape descriptions `B` denotes rows, `R` inserted rows, `W` the canvas, `L` the text buffer, `V` the vocabulary
and `E` the model width.
"""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from specjax.decoder import Decoder
from specjax.diffusion.common import draws
from specjax.diffusion.renoise import EntropyRenoise
from specjax.lm import LM, Block, Output, Wants
from specjax.pretty import Pretty
from specjax.prompts import Prompts
from specjax.sampling.noise import keys_at
from specjax.sampling.sampler import best
from specjax.sampling.warp import warp
from specjax.sharding.ambient import on_mesh
from specjax.sharding.rules import constrain, rounded
from specjax.state import Finish, Rows, Stats, finish_rows

Array = jax.Array
PyTree = Any

NOISE = 5  # the purpose of the random tokens, in addition to those of `specjax.diffusion.decoder`


class CanvasLM(LM, Protocol):
    """A model that reads text as an `LM`, causally, and canvases after it."""

    def read(
        self, params: PyTree, tokens: Array, positions: Array, cache: PyTree, soft: Array, settled: Array
    ) -> Output:
        """Reads one block per row after what the cache holds before its first position: `final`, and a `delta`.

        Args:
          params: the parameters.
          tokens: `[B, W]` int32.
          positions: `[B, W]` int32, in sequence.
          cache: of the text.
          soft: `[B, W, E]`, from the last pass over the canvas; 0 before the first.
          settled: `[B]` bool: whether the row's tokens are text, read as in `__call__`; only then may the delta be
            stored.
        """
        ...

    def soften(self, params: PyTree, log_probs: Array) -> Array:
        """Mean embeddings `[B, W, E]` under the distributions `[B, W, V]`, for the next pass."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CanvasState(Rows):
    """The rows of a canvas decoder; `tokens` are text, and garbage from `length` on.

    Attributes:
      stored: `[B]` int32, how many of these tokens the cache holds; in a running row all, or all but the last canvas.
      step: `[B]` int32, passes over the canvas so far.
      canvas: `[B, W]` int32, the tokens that the next pass reads.
      soft: `[B, W, E]`, the next pass's soft embedding of the last one's distributions.
      memory: the sampler's.
      cache: keys and values of the text.
    """

    stored: Array
    step: Array
    canvas: Array
    soft: Array
    memory: PyTree
    cache: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CanvasInfo(Pretty):
    """The record of one step; the next step does not need it.

    Attributes:
      start: `[B]` int32, the first position of the block that was read.
      kept: `[B, W]` bool, the predictions that the next pass reads.
      finished: `[B]` bool, rows whose canvas became text.
    """

    start: Array
    kept: Array
    finished: Array


@dataclasses.dataclass(frozen=True)
class CanvasDiffusion(Decoder[CanvasState]):
    """A decoder of canvases. Static and hashable: pure functions `empty`, `prefill` and `step`, see `Decoder`.

    A step is a pass over one block per row: its canvas, or a final one that is not stored yet. Canvases follow the
    prompt, wherever it ends; the last one is read whole, and cut at the row's limit.

    The random token at a position is a function of the row's key, the position and the pass, and so is the noise of a
    draw: neither the batch nor the mesh changes them. At temperature 0 predictions are the likeliest tokens. Otherwise
    they are drawn from the distribution after the sampler's own temperature, warped by the row's options; temperature 1
    is the published sampler.

    Attributes:
      target: the model.
      policy: the sampler.
      block_length: W.
      mesh: keeps the state on its shardings: rows over `data`, the cache's heads over `model`, its slots over
        `context`.
    """

    target: CanvasLM
    policy: EntropyRenoise = EntropyRenoise()
    block_length: int = 256
    mesh: jax.sharding.Mesh | None = None

    def checked(self) -> Self:
        """Itself.

        Raises:
          ValueError: for an empty canvas.
        """
        if self.block_length < 1:
            raise ValueError(f"block_length must be at least 1, got {self.block_length}")
        return self

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> CanvasState:
        """See `Decoder.empty`."""
        capacity = rounded(self.mesh, "slots", capacity)
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        canvas = zeros(self.block_length)
        dtype = jax.tree.leaves(params["target"])[0].dtype if cache_dtype is None else cache_dtype
        feature = jax.eval_shape(self.target.embed, params["target"], canvas)
        state = CanvasState.blank(
            batch,
            capacity,
            self.block_length,
            eos_width,
            stored=zeros(),
            step=zeros(),
            canvas=canvas,
            soft=jnp.zeros(feature.shape, feature.dtype),
            memory=self.policy.init(batch, self.block_length),
            cache=self.target.init_cache(batch, capacity, dtype),
        )
        return self._constrain(state)

    def prefill(self, params: PyTree, state: CanvasState, prompts: Prompts) -> CanvasState:
        """See `Decoder.prefill`: the prompts' keys and values are stored.

        Only a row's temperature, top-k, top-p and min-p are used.
        """
        count, size = prompts.tokens.shape
        capacity, lengths = state.tokens.shape[1], jnp.asarray(prompts.lengths)
        dtype = jax.tree.leaves(state.cache)[0].dtype
        fresh = self.empty(params, count, capacity, dtype, state.eos.shape[1])
        kept = min(size, capacity)
        limit = jnp.clip(prompts.limit, lengths, capacity)
        width = min(prompts.width or size, size)
        return dataclasses.replace(
            fresh,
            tokens=fresh.tokens.at[:, :kept].set(prompts.tokens[:, :kept]),
            length=lengths,
            finish=jnp.where(lengths < limit, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
            key=prompts.keys,
            prompt_length=lengths,
            limit=limit,
            eos=prompts.ends(state.eos.shape[1]),
            sampling=prompts.sampling,
            stored=lengths,
            canvas=self._noise(prompts.keys, fresh.step, self._positions(lengths)),
            cache=self._read(params["target"], fresh.cache, prompts.tokens, lengths, width, capacity),
        )

    def _read(self, weights, cache, tokens, lengths, width, capacity):
        """A cache that holds the prompts, read `width` tokens at a time."""
        padded = jnp.pad(tokens, ((0, 0), (0, width)))

        def read(i, cache):
            part = jax.lax.dynamic_slice_in_dim(padded, i * width, width, axis=1)
            at = jnp.broadcast_to(i * width + jnp.arange(width, dtype=jnp.int32)[None], part.shape)
            delta = self.target(weights, Block(part, at, at[:, 0]), cache, wants=Wants()).delta
            return self.target.commit(cache, delta, None, jnp.where(at < lengths[:, None], at, capacity))

        return jax.lax.fori_loop(0, -(-jnp.max(lengths) // width), read, cache)

    def axes(self, state: CanvasState) -> CanvasState:
        """Logical axis names of every leaf of the state."""
        axes = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)
        return dataclasses.replace(axes, cache=self.target.cache_axes(state.cache))

    def _constrain(self, state: CanvasState) -> CanvasState:
        return constrain(self.mesh, self.axes(state), state)

    def _positions(self, start: Array) -> Array:
        return start[:, None] + jnp.arange(self.block_length, dtype=jnp.int32)[None]

    def _noise(self, keys: Array, step: Array, at: Array) -> Array:
        """The random tokens `[B, W]` that a pass reads at positions `at` `[B, W]`, with `step` `[B]` passes before it."""
        folded = keys_at(jax.vmap(jax.random.fold_in)(keys, step), at, NOISE)
        draw = lambda key: jax.random.randint(key, (), 0, self.target.vocab_size, jnp.int32)
        return jax.vmap(jax.vmap(draw))(folded)

    @on_mesh
    def step(self, params: PyTree, state: CanvasState) -> tuple[CanvasState, CanvasInfo]:
        """One pass over a block of every row: it renews the canvas, makes it text, or stores that text."""
        weights, capacity = params["target"], state.tokens.shape[1]
        live = ~state.done
        storing = live & (state.stored < state.length)
        at = self._positions(state.stored)
        text = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        with jax.named_scope("target"):
            read = jnp.where(storing[:, None], text, state.canvas)
            output = self.target.read(weights, read, at, state.cache, state.soft, storing)
            logits = self.target.unembed(weights, output.final)
        with jax.named_scope("predict"):
            scores = logits / self.policy.heat(state.step)[:, None, None]
            likeliest = best(scores)
            drawn = self._draw(state, at, scores, likeliest)
            log_probs = jax.nn.log_softmax(scores, axis=-1)
        failed = live & jnp.any(likeliest < 0, axis=1)
        with jax.named_scope("renoise"):
            keep, final, memory = self.policy(log_probs, likeliest, state.step, state.memory)
        storing = storing & ~failed
        working = live & ~storing & ~failed
        finished = working & final
        renewed = working & ~finished
        keep = keep & renewed[:, None]
        with jax.named_scope("target"):
            soft = self.target.soften(weights, log_probs)
            cache = self.target.commit(state.cache, output.delta, None, jnp.where(storing[:, None], at, capacity))
        step = jnp.where(finished, 0, state.step + working)
        noise = self._noise(state.key, step, at + self.block_length * finished[:, None])

        def next_of(new, blank, old):
            """`new` in rows whose canvas goes on, `blank` in rows that begin another one."""
            wide = lambda mask: jnp.expand_dims(mask, tuple(range(1, new.ndim)))
            return jnp.where(wide(renewed), new, jnp.where(wide(finished), blank, old))

        blank = self.policy.init(*state.canvas.shape)
        state = dataclasses.replace(
            self._finish(state, at, likeliest, finished, failed),
            stored=state.stored + self.block_length * storing,
            step=step,
            canvas=next_of(jnp.where(keep, drawn, noise), noise, state.canvas),
            soft=next_of(soft, jnp.zeros_like(soft), state.soft),
            memory=jax.tree.map(next_of, memory, blank, state.memory),
            cache=cache,
        )
        return self._constrain(state), CanvasInfo(at[:, 0], keep, finished)

    def _draw(self, state, at, scores, likeliest):
        """Predictions `[B, W]`: the likeliest tokens, or draws in sampled rows."""
        live, sampled = ~state.done, state.sampling.temperature > 0

        def draw():
            keys = jax.vmap(jax.random.fold_in)(state.key, state.step)
            drawn = draws(warp(scores, state.sampling, live), keys, at, sampled)
            return jnp.where(sampled[:, None], drawn, likeliest)

        return jax.lax.cond(jnp.any(live & sampled), draw, lambda: likeliest)

    def _finish(self, state, at, likeliest, finished, failed) -> CanvasState:
        """The state with the tokens of finished canvases as text, cut at the limit and after an end of text."""
        live = ~state.done
        real = at < state.limit[:, None]
        tokens = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
            state.tokens, jnp.where(finished[:, None] & real, at, state.tokens.shape[1]), likeliest
        )
        count = jnp.where(finished, real.sum(axis=1), 0)
        ends = jnp.any(likeliest[:, :, None] == state.eos[:, None, :], axis=2) & real & finished[:, None]
        eos = ends.any(axis=1)
        count = jnp.where(eos, jnp.argmax(ends, axis=1) + 1, count).astype(jnp.int32)
        length = state.length + count
        steps = live.astype(jnp.int32)
        committed = jnp.arange(self.block_length + 1)[None] == count[:, None]
        return dataclasses.replace(
            state,
            tokens=tokens,
            length=length,
            finish=finish_rows(state, length, eos, failed),
            stats=Stats(state.stats.steps + steps, state.stats.accepted + steps[:, None] * committed),
        )
