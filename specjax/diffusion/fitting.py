"""What a pass may write into a canvas that must become a text of a language: as many of the surest tokens as can stand
together.

Each token may stand where it was predicted, if all else stays (`specjax.sampling.warp.filled`). Two of one pass may
still exclude each other. So a pass's tokens are put in order, and a beginning of that order is written after which the
canvas can still be filled.

That is the longest one if the pass replaces no token: if a beginning fits, so does every shorter one. Where tokens are
replaced, two may fit together and neither alone, so bisection may miss a longer beginning. It never writes less than the
longest beginning that replaces nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.arrays import Array
from specjax.diffusion.common import block_of, put
from specjax.diffusion.state import DiffusionState
from specjax.diffusion.unmask.base import Choice, ranks
from specjax.sampling.warp import bound, completable, fillings
from specjax.warpers.gaps import Gaps


def gaps_of(state: DiffusionState, mask_id: int, end: Array, never: tuple[int, ...]) -> Gaps:
    """The rows' new texts: from `prompt_length` to the last open position, before `end` `[B]`.

    Args:
      state: the rows.
      mask_id: the id of an open position.
      end: `[B]` int32, where texts end.
      never: ids that are not predicted.
    """
    at = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(state.opened, at + 1, 0), axis=1)
    is_open = state.tokens == mask_id
    begin = state.prompt_length
    return Gaps(
        state.tokens, is_open, begin, jnp.maximum(jnp.minimum(end, last), begin), ~state.done, (mask_id, *never)
    )


def fitted(
    state: DiffusionState, gaps: Gaps, at: Array, view: Array, commit: Array, choice: Choice
) -> tuple[Array, Choice]:
    """The commits `[B, W]` and the choice of a pass, cut so that its canvases can be filled; see this module.

    The order is: tokens of open positions, the surest first; those at further positions, from left to right; tokens
    that replace others, the surest first. Of the tokens that were predicted for the canvas, the first alone always fits.

    Args:
      state: the rows before the pass.
      gaps: their texts.
      at: `[B, W]` int32, the positions of the block.
      view: `[B, N]` int32, those of an overview.
      commit: `[B, W]` bool, what would be committed.
      choice: of the policy.
    """
    known = fillings(state.sampling, gaps.never)
    on = bound(known, gaps.live)
    if on is None:
        return commit, choice
    cut = lambda: _cut(known, gaps, on, at, view, commit, choice)
    return jax.lax.cond(jnp.any(on), cut, lambda: (commit, choice))


def _cut(known, gaps, on, at, view, commit, choice):
    tokens, place, base = _proposed(gaps, at, view, commit, choice)

    def with_first(count) -> Gaps:
        new = (tokens >= 0) & (place < count[:, None])
        return dataclasses.replace(base, tokens=jnp.where(new, tokens, base.tokens), open=base.open & ~new)

    def one(carry):
        low, high, asked = carry
        fits = completable(known, with_first(asked))
        low, high = jnp.where(fits, asked, low), jnp.where(fits, high, asked - 1)
        low = jnp.minimum(low, high)
        return low, high, (low + high + 1) // 2

    count = jnp.where(on, (tokens >= 0).sum(axis=1), 0)
    start = jnp.zeros_like(count), count, count
    kept = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < carry[1]), one, start)[0]
    stays = (tokens < 0) | (place < kept[:, None]) | ~on[:, None]
    commit = commit & block_of(stays, at)
    if choice.edit is not None:
        choice = dataclasses.replace(choice, edit=choice.edit & block_of(stays, at))
    if choice.besides is not None:
        choice = dataclasses.replace(choice, besides=jnp.where(block_of(stays, view), choice.besides, -1))
    if choice.end is not None:
        shorter = dataclasses.replace(with_first(kept), end=jnp.clip(choice.end, gaps.begin, gaps.end))
        ends = completable(known, shorter) | ~on
        choice = dataclasses.replace(choice, end=jnp.where(ends, choice.end, jnp.iinfo(jnp.int32).max))
    return commit, choice


def _proposed(gaps, at, view, commit, choice) -> tuple[Array, Array, Gaps]:
    """What a pass would write `[B, L]`, -1 for nothing; each token's place in the order `[B, L]`; and the canvas without
    what the pass opens.
    """
    size, width = gaps.tokens.shape[1], at.shape[1]
    tokens, place = jnp.full_like(gaps.tokens, -1), jnp.full_like(gaps.tokens, 2 * (size + width))
    gone = jnp.zeros_like(gaps.open)
    if choice.edit is not None:
        tokens = put(tokens, at, choice.edit, choice.tokens)
        place = put(place, at, choice.edit, size + width + ranks(choice.score, choice.edit))
    tokens = put(tokens, at, commit, choice.tokens)
    if choice.besides is not None:
        besides = choice.besides >= 0
        tokens = put(tokens, view, besides, choice.besides)
        place = put(place, view, besides, width + jnp.cumsum(besides, axis=1))
    place = put(place, at, commit, ranks(choice.score, commit))
    if choice.reopen is not None:
        gone = put(gone, at, choice.reopen, jnp.ones_like(choice.reopen))
    if choice.undo is not None:
        gone = put(gone, view, choice.undo, jnp.ones_like(choice.undo))
    tokens = jnp.where(gone, -1, tokens)
    place = jnp.argsort(jnp.argsort(jnp.where(tokens >= 0, place, 4 * (size + width)), axis=1), axis=1)
    return tokens, place, dataclasses.replace(gaps, open=gaps.open | gone)
