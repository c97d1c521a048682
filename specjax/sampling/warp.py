"""Applies the warpers of the table, in its order; plain sampling, drafting and verification all call this."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.sampling_params import SamplingArrays
from specjax.warpers import WARPERS, Text, Warper
from specjax.warpers.base import Columns, Filling, chosen
from specjax.warpers.gaps import Gaps

Array = jax.Array


def warp(logits: Array, sampling: SamplingArrays, live: Array, text: Text | None = None) -> Array:
    """Scores `[B, T, V]` of sampled rows after the temperature and the warpers that follow it; removed tokens are -inf.

    Rows at temperature 0 come back unchanged. A warper costs nothing unless a live row uses it.

    Args:
      logits: `[B, T, V]` float32, after the logit warpers.
      sampling: the rows' parameters.
      live: `[B]` bool, rows whose result matters.
      text: the text before each position; None if texts have gaps.

    Raises:
      ValueError: if a warper reads the text and there is none.
    """
    scores = logits
    for each, own, on in _sampled(sampling, live, text):
        scores = each(scores, own, on, text)
    return scores


def carried(
    logits: Array, sampling: SamplingArrays, live: Array, text: Text, tokens: Array, count: Array
) -> Mapping[str, Array] | None:
    """The sums that warpers carry, `[B]` each, after some tokens were drawn one after the other.

    Args:
      logits: `[B, T, V]` float32, after the logit warpers, from which each token was drawn.
      sampling: the rows' parameters.
      live: `[B]` bool.
      text: the text before each of those positions, with the sums so far; if these are None, the result is None.
      tokens: `[B, T]` int32.
      count: `[B]` int32, how many were committed.
    """
    if text.carried is None or not carries(sampling):
        return text.carried
    sums: dict[str, Array] = {}
    scores, last = logits, jnp.maximum(count - 1, 0)[:, None]
    pick = lambda x: jnp.take_along_axis(x, last, axis=1)[:, 0]
    for each, own, on in _sampled(sampling, live, text):
        if each.carries:
            start = text.carried[each.switches[0]]
            cost = each.cost(scores, own)
            added = jnp.take_along_axis(cost, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
            after = pick(text.summed(start, cost)) + pick(added)
            sums[each.switches[0]] = jnp.where(on & (count > 0), after, start)
        scores = each(scores, own, on, text)
    return sums


def walked(sampling: SamplingArrays, carried: Mapping[str, Any], tokens: Array, count: Array) -> Mapping[str, Any]:
    """`carried` with the states of warpers that walk after some tokens were drawn one after the other.

    Args:
      sampling: the rows' parameters.
      carried: sums and states so far, `[B, ...]` each.
      tokens: `[B, T]` int32.
      count: `[B]` int32, how many were committed.
    """
    for each, own in _walking(sampling):
        states = jax.tree.map(lambda x: x[:, None], carried[each.switches[0]])
        for step in range(tokens.shape[1]):
            moved = each.moved(own, states, jnp.maximum(tokens[:, step : step + 1], 0))
            states = chosen((step < count)[:, None], moved, states)
        carried = {**carried, each.switches[0]: jax.tree.map(lambda x: x[:, 0], states)}
    return carried


def guessed(sampling: SamplingArrays, text: Text, count: int) -> Array:
    """`[B, count]` int32: the tokens that warpers guess after a text, one after the other; -1 from the first that none
    guesses.

    Args:
      sampling: the rows' parameters.
      text: without paths.
      count: static.
    """
    found = jnp.full((text.length.shape[0], count), -1, jnp.int32)
    for each, own in _walking(sampling):
        states, tokens, goes = text.walked(each, own), [], True
        for _ in range(count):
            guess = each.guessed(own, states)
            if guess is None:
                break
            tokens.append(jnp.where(goes, guess, -1))
            goes = tokens[-1] >= 0
            states = each.moved(own, states, jnp.maximum(tokens[-1], 0))
        own_guess = jnp.concatenate(tokens, axis=1) if tokens else found
        found = jnp.where((found < 0) & each.used(own)[:, None], own_guess, found)
    return found


def carries(sampling: SamplingArrays) -> bool:
    """Whether there are columns for a warper that carries a sum."""
    return any(each.carries and sampling.own(each) is not None for each in WARPERS)


def walks(sampling: SamplingArrays) -> bool:
    """Whether there are columns for a warper that walks along paths."""
    return any(each.walks and sampling.own(each) is not None for each in WARPERS)


def unrestricted(sampling: SamplingArrays) -> SamplingArrays:
    """The parameters without those of warpers that walk along the text, which leave a language."""
    gone = {field.name for each in WARPERS if each.walks for field in dataclasses.fields(each)}
    return SamplingArrays({name: column for name, column in sampling.columns.items() if name not in gone})


def allowed(sampling: SamplingArrays, text: Text, vocab: int) -> Array:
    """`[B, T, V]` bool: the tokens that warpers leave which walk along the text."""
    scores = jnp.zeros((*text.below().shape[:2], vocab))
    for each, own in _walking(sampling):
        scores = jnp.where(each.used(own)[:, None, None], each.warp(scores, own, text), scores)
    return scores > -jnp.inf


def asks(sampling: SamplingArrays) -> Array | None:
    """`[B]` bool: the rows for which a host is asked which tokens may follow; None if no row can be one."""
    found = [rows for each, own in _walking(sampling) if (rows := each.asks(own)) is not None]
    return functools.reduce(jnp.logical_or, found) if found else None


def tried(sampling: SamplingArrays, text: Text, vocab: int, first: Array, second: Array, again: Array) -> Array:
    """`[B, 2, M]` bool: which tokens of two orders `[B, M]` warpers leave which walk along the text; see `Warper.tried`."""
    orders = jnp.stack([first, second], axis=1)
    found = jnp.ones(orders.shape, bool)
    for each, own in _walking(sampling):
        left = each.tried(own, text, orders, again, vocab)
        found = found & jnp.where(each.used(own)[:, None, None], left, True)
    return found


Fillings = tuple[tuple[Array, Filling], ...]
"""Of each warper that knows what may stand in a canvas: the rows `[B]` that use it, and what it knows."""


def fillings(sampling: SamplingArrays, never: tuple[int, ...]) -> Fillings:
    """What the warpers with columns know of canvases; `never` are ids that will not be written.

    It depends on the parameters alone. So make it outside branches and loops.
    """
    owns = [(each, sampling.own(each)) for each in WARPERS if each.fills]
    return tuple((each.used(own), each.filling(own, never)) for each, own in owns if own is not None)


def bound(known: Fillings, live: Array) -> Array | None:
    """`[B]` bool: the live rows whose canvases warpers restrict; None if no row can be one."""
    return functools.reduce(jnp.logical_or, [live & used for used, _ in known]) if known else None


def filled(scores: Array, known: Fillings, gaps: Gaps, at: Array) -> Array:
    """Scores `[B, N, V]` of tokens at places `at` `[B, N]` of a canvas, without those after which it could not be filled.

    The places are in sequence, and all before the first of them is known.
    """
    for used, filling in known:
        on = gaps.live & used
        change = lambda scores, filling=filling, on=on: jnp.where(
            on[:, None, None], filling.filled(scores, gaps, on, at), scores
        )
        scores = jax.lax.cond(jnp.any(on), change, lambda scores: scores, scores)
    return scores


def completable(known: Fillings, gaps: Gaps) -> Array:
    """`[B]` bool: whether warpers let the open places of a canvas be filled."""
    found = jnp.ones_like(gaps.live)
    for used, filling in known:
        on = gaps.live & used
        found = found & (filling.completable(gaps, on) | ~on)
    return found


def _walking(sampling: SamplingArrays) -> Iterator[tuple[Warper, Columns]]:
    """The warpers with columns that walk along the text, each with its columns."""
    for each in WARPERS:
        own = sampling.own(each) if each.walks else None
        if own is not None:
            yield each, own


def _sampled(sampling: SamplingArrays, live: Array, text: Text | None) -> Iterator[tuple[Warper, Columns, Array]]:
    """The warpers of sampled rows with columns, each with its columns and the rows that it applies to."""
    active = live & (sampling.temperature > 0)
    for each in WARPERS:
        own = sampling.own(each)
        if own is None or each.of_logits:
            continue
        if text is None and each.reads_text:
            raise ValueError(
                f"{each.switches[0]} reads a text from left to right, and there is no such text here: leave it out"
            )
        yield each, own, active & each.used(own)


def penalise(
    logits: Array, sampling: SamplingArrays, live: Array, text: Text, within: Callable = lambda work: work
) -> Array:
    """Logits `[B, T, V]` after the warpers that come before the temperature, and change greedy rows too.

    Args:
      logits: `[B, T, V]` float32.
      sampling: the rows' parameters.
      live: `[B]` bool, rows whose result matters.
      text: the text before each position.
      within: turns a warper's work on all tokens into work on the tokens that have logits.
    """
    for each in WARPERS:
        own = sampling.own(each)
        if own is None or not each.of_logits:
            continue
        on = live & each.used(own)
        work = within(lambda scores, each=each, own=own: each.warp(scores, own, text))
        change = lambda logits, on=on, work=work: jnp.where(on[:, None, None], work(logits), logits)
        logits = jax.lax.cond(jnp.any(on), change, lambda logits: logits, logits)
    return logits


def penalised_rows(sampling: SamplingArrays) -> Array:
    """`[B]` bool: the rows whose logits a warper changes before the temperature."""
    used = [each.used(own) for each in WARPERS if each.of_logits and (own := sampling.own(each)) is not None]
    return functools.reduce(jnp.logical_or, used, jnp.zeros_like(sampling.temperature, bool))
