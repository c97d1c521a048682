"""Applies the warpers of the table, in its order: plain sampling, drafting and verification all call this."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.sampling_params import Sampling
from specjax.warpers import WARPERS, Text

Array = jax.Array


def warp(logits: Array, sampling: Sampling, live: Array, text: Text | None = None) -> Array:
    """Scores `[B, T, V]` of sampled rows after temperature and what follows it; removed tokens are -inf.

    Rows at temperature 0 come back unchanged. A warper costs nothing unless a live row uses it.

    Args:
      logits: `[B, T, V]` float32, after the warpers of logits.
      sampling: the rows' parameters.
      live: `[B]` bool, rows whose result matters.
      text: what stands before each position; None where texts have gaps.

    Raises:
      ValueError: where a warper reads the text and there is none.
    """
    active = live & (sampling.temperature > 0)
    scores = logits
    for each in WARPERS:
        own = sampling.own(each)
        if own is None or each.of_logits:
            continue
        if text is None and each.reads_text:
            raise ValueError(f"{each.switches[0]} reads a text from left to right, which there is none of here")
        scores = each(scores, own, active & each.used(own), text)
    return scores


def penalise(logits: Array, sampling: Sampling, live: Array, text: Text, within: Callable = lambda work: work) -> Array:
    """Logits `[B, T, V]` after the warpers that come before the temperature, and change greedy rows too.

    Args:
      logits: `[B, T, V]` float32.
      sampling: the rows' parameters.
      live: `[B]` bool, rows whose result matters.
      text: what stands before each position.
      within: puts what a warper does to all tokens around what it does to those that logits are of.
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


def penalised_rows(sampling: Sampling) -> Array:
    """`[B]` bool: the rows of which a warper changes the logits before the temperature."""
    used = [each.used(own) for each in WARPERS if each.of_logits and (own := sampling.own(each)) is not None]
    return functools.reduce(jnp.logical_or, used, jnp.zeros_like(sampling.temperature, bool))
