"""Samples of prompts as one pure function of parameters and prompts.

In the shape descriptions `R` denotes samples, `G` samples of one prompt, `L` the text buffer, `T` columns of completions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import Array, Bool, Float, Int
from specjax.decoder import NO_LIMIT, Decoder, check_params, check_rows, formed, on_host, run_program
from specjax.names import named
from specjax.pretty import Pretty
from specjax.prompts import Prompts
from specjax.settings import settled
from specjax.sharding.ambient import under
from specjax.sharding.rules import constrain
from specjax.speculative import prefill_columns, prefill_width
from specjax.state import Finish

PyTree = Any

LOGPROBS = ("raw", "tempered", "warped")
"""The log-probabilities that a rollout may keep: fields of `specjax.state.LogProbs`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Completions(Pretty):
    """The completions alone, each from column 0 on.

    Attributes:
      tokens: `[R, T]` int32, padded on the right.
      mask: `[R, T]` bool, which tokens are real.
      logprobs: by name, `[R, T]` float32; 0 where the mask is false.
    """

    tokens: Int[Array, "R T"]
    mask: Bool[Array, "R T"]
    logprobs: dict[str, Float[Array, "R T"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout(Pretty):
    """Samples of prompts, one per row.

    Attributes:
      tokens: `[R, L]` int32, each prompt and its completion; 0 after that.
      prompt_lengths: `[R]` int32.
      lengths: `[R]` int32, of prompt and completion; an end of text counts.
      finish: `[R]` int32, a `specjax.Finish` value: EOS, LENGTH, or ERROR if logits were not finite.
      steps: `[R]` int32, passes of the target.
      logprobs: those that were asked for, by name, each `[R, L]` float32 at its token's place; 0 outside the completion.
      learnt: what rows share of the drafter's state, for the next call; None for a drafter without a state.
    """

    tokens: Int[Array, "R L"]
    prompt_lengths: Int[Array, " R"]
    lengths: Int[Array, " R"]
    finish: Int[Array, " R"]
    steps: Int[Array, " R"]
    logprobs: dict[str, Float[Array, "R L"]]
    learnt: PyTree = None

    @property
    def mask(self) -> Bool[Array, "R L"]:
        """`[R, L]` bool, the tokens of completions, an end of text included."""
        at = jnp.arange(self.tokens.shape[1])[None]
        return (at >= self.prompt_lengths[:, None]) & (at < self.lengths[:, None])

    @property
    def finished(self) -> Bool[Array, " R"]:
        """`[R]` bool, whether a text ended by itself."""
        return self.finish == Finish.EOS

    def completions(self, width: int, *, pad: int = 0, end: bool = True) -> Completions:
        """The completions `[R, T]` without their prompts.

        Args:
          width: T; longer completions are cut.
          pad: the id after a completion.
          end: whether an end of text belongs to its completion.
        """
        last = self.lengths if end else self.lengths - self.finished
        at = self.prompt_lengths[:, None] + jnp.arange(width)[None]
        mask = at < last[:, None]
        pick = lambda x, none: jnp.where(mask, jnp.take_along_axis(x, at, axis=1, mode="clip"), none)
        return Completions(pick(self.tokens, pad), mask, {name: pick(x, 0.0) for name, x in self.logprobs.items()})


@named
@settled
def rollout(
    decoder: Decoder,
    params: PyTree,
    prompts: Prompts,
    *,
    group: int = 1,
    capacity: int,
    logprobs: Sequence[str] = (),
    learnt: PyTree = None,
) -> Rollout:
    """Samples completions until all have ended: one program from prefill to the last token.

    The program depends on the decoder, `group`, `capacity`, `logprobs` and the shapes of `params` and `prompts`. New
    parameters, prompts, temperatures and seeds run the same one. Columns of `prompts` are rounded up to few sizes.

    A row's text is the one that `specjax.generate` gives for the prompt, its seed and its place among equal prompts, up to
    the margin rule. Whatever is drafted, the default verifier leaves the text alone, so samples are on the policy
    `params["target"]`, with a stale draft too.

    It may be called inside a program of the caller's; then nothing is checked on the host.

    Args:
      decoder: such as `specjax.speculative(...)` or `Engine.decoder`.
      params: the decoder's parameters.
      prompts: R rows, a row for each sample.
      group: G, how many rows that follow each other have the same prompt. A prompt is then read once, where the decoder
        can copy rows (`Decoder.reads_prefix`).
      capacity: L, the longest text and the decoder's `slack`.
      logprobs: names in `LOGPROBS`. `raw` are the model's own, `tempered` those after the temperature alone, and `warped`
        those of the distribution that tokens were drawn from.
      learnt: `Rollout.learnt` of an earlier call, so that a drafter that learns from texts (`suffix`) goes on with it.

    Raises:
      ValueError: for a name that there is not, a decoder without log-probabilities, rows of a group that differ, or
        rows that do not fit; see `specjax.decoder.check_rows`.
    """
    names = _names(logprobs)
    decoder = _keeping(decoder, bool(names))
    check_params(decoder, params)
    check_rows(decoder, capacity, prompts)
    _check_group(prompts, group)
    return _program(decoder, params, *jax.device_put((_widened(prompts, capacity), learnt)), group, capacity, names)


def _rollout(decoder, params, prompts, learnt, group, capacity, names) -> Rollout:
    rows = prompts.tokens.shape[0]
    eos_width = 1 if prompts.eos is None else prompts.eos.shape[1]
    state = decoder.empty(params, rows, capacity, None, eos_width)
    state = formed(decoder, state, prompts.sampling.form)
    axes = decoder.axes(state)
    if learnt is not None:
        state = dataclasses.replace(state, draft=_taught(state, axes, learnt))
    if group > 1 and decoder.reads_prefix:
        state = _begun(decoder, params, state, prompts, group)
    else:
        state = decoder.insert(params, state, jnp.arange(rows, dtype=jnp.int32), prompts)
    state = run_program(decoder, params, state, jnp.int32(NO_LIMIT), jnp.int32(1))
    found = Rollout(
        tokens=jnp.where(jnp.arange(state.tokens.shape[1])[None] < state.length[:, None], state.tokens, 0),
        prompt_lengths=state.prompt_length,
        lengths=state.length,
        finish=state.finish,
        steps=state.stats.steps,
        logprobs={},
        learnt=_shared(state, axes),
    )
    kept = {name: jnp.where(found.mask, getattr(state.logprobs, name), 0.0) for name in names}
    return dataclasses.replace(found, logprobs=kept)


_program = jax.jit(_rollout, static_argnums=(0, 4, 5, 6))


def _begun(decoder, params, state, prompts, group):
    """The state whose rows hold the prompts, each of which is read once and copied to the rows of its group."""
    axes, rows = decoder.axes(state), prompts.tokens.shape[0]
    of_row = lambda names: names[:1] == ("batch",)
    with under(getattr(decoder, "mesh", None)):
        read = decoder.prefill(params, state, jax.tree.map(lambda x: x[::group], prompts))
        spread = lambda leaf, names: jnp.repeat(leaf, group, axis=0) if of_row(names) else leaf
        fresh = jax.tree.map(spread, read, axes)
        own = dataclasses.replace(
            fresh,
            key=prompts.keys,
            limit=jnp.clip(prompts.limit, fresh.length, state.tokens.shape[1] - decoder.slack),
            eos=prompts.ends(state.eos.shape[1]),
        ).drawing(prompts.sampling)
        placed = state.place(jnp.arange(rows, dtype=jnp.int32), own, axes)
        return constrain(getattr(decoder, "mesh", None), axes, placed)


def _shared(state, axes):
    """The part of the drafter's state that belongs to no row; a scalar in place of every other leaf."""
    own = lambda leaf, names: jnp.zeros((), leaf.dtype) if names[:1] == ("batch",) else leaf
    return jax.tree.map(own, getattr(state, "draft", None), getattr(axes, "draft", None))


def _taught(state, axes, learnt):
    """The drafter's state with what rows shared in an earlier one."""
    wanted = jax.tree.map(jnp.shape, _shared(state, axes))
    if jax.tree.map(jnp.shape, learnt) != wanted:
        raise ValueError(
            "learnt is of another drafter, number of rows or capacity: give the Rollout.learnt of a call like this one"
        )
    take = lambda own, given, names: own if names[:1] == ("batch",) else given
    return jax.tree.map(take, state.draft, learnt, axes.draft)


def _names(logprobs):
    names = (logprobs,) if isinstance(logprobs, str) else tuple(logprobs)
    for name in names:
        if name not in LOGPROBS:
            raise ValueError(f"unknown log-probabilities {name!r}; choose {', '.join(LOGPROBS)}")
    return names


def _keeping(decoder, asked):
    """The decoder with log-probabilities if they are asked for, and without otherwise."""
    if hasattr(decoder, "logprobs"):
        return decoder if decoder.logprobs == asked else dataclasses.replace(decoder, logprobs=asked)
    if asked:
        raise ValueError(f"a {type(decoder).__name__} keeps no log-probabilities: leave them out")
    return decoder


def _check_group(prompts, group):
    rows = prompts.tokens.shape[0]
    if not isinstance(group, int) or group < 1 or rows % group:
        raise ValueError(f"{rows} rows are no groups of {group}: give a row for each sample of every prompt")
    if group == 1 or not on_host(prompts.tokens, prompts.lengths):
        return
    tokens, lengths = (np.asarray(x) for x in jax.device_get((prompts.tokens, prompts.lengths)))
    real = np.where(np.arange(tokens.shape[1])[None] < lengths[:, None], tokens, -2)
    read = [real, *(np.asarray(x) for x in jax.tree.leaves(jax.device_get(prompts.source)))]
    other = [x != np.repeat(x[::group], group, axis=0) for x in read]
    for row in np.flatnonzero(np.any([x.reshape(rows, -1).any(axis=1) for x in other], axis=0)):
        raise ValueError(
            f"prompt {row} differs from the first of its group of {group}: repeat each prompt {group} times in a row"
        )


def _widened(prompts, capacity):
    """The prompts in one of few numbers of columns, so that batches share programs."""
    size = prompts.tokens.shape[1]
    columns = prefill_columns(size, prompts.width or prefill_width(size), capacity)
    if columns <= size:
        return prompts
    pad = np.pad if isinstance(prompts.tokens, np.ndarray) else jnp.pad
    return dataclasses.replace(prompts, tokens=pad(prompts.tokens, ((0, 0), (0, columns - size))))
