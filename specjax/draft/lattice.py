"""A lattice of candidate tokens, slot by slot, and the best path through it by a beam (DiffuSpec, arXiv:2510.02358)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lattice:
    """Candidates of K slots, C each.

    Attributes:
      tokens: `[B, K, C]` int32, the likeliest first and an end of text last.
      log_p: `[B, K, C]` float32; -inf where there is no candidate.
      ends: `[B, K, C]` bool, which of them end a text.
      slots: `[B]` int32, how many slots a path may have.
      generated: `[B]` int32, how many slots come before the first whose likeliest token ends the text, at most the row's
        k.
    """

    tokens: Array
    log_p: Array
    ends: Array
    slots: Array
    generated: Array


def lattice(log_p: Array, eos: Array | None, k: Array, mass: float, most: int) -> Lattice:
    """Of every slot the smallest set of likeliest tokens with a mass of at least `mass`, and an end of text.

    The lattice ends after the first slot whose likeliest token is an end of text.

    Args:
      log_p: `[B, K, V]` log-probabilities.
      eos: `[B, E]` int32, ids that end a text, padded with -1; None for none.
      k: `[B]` int32, the slots that are filled.
      mass: in (0, 1].
      most: the largest set, without the end of text.
    """
    batch, slots, _ = log_p.shape
    top, tokens = jax.lax.top_k(log_p, most)
    mine = jnp.exp(top)
    top = jnp.where(jnp.cumsum(mine, axis=2) - mine < mass, top, -jnp.inf)
    eos = jnp.full((batch, 1), -1, jnp.int32) if eos is None else eos
    ending = lambda tokens: jnp.any((tokens[..., None] == eos[:, None, None]) & (eos >= 0)[:, None, None], axis=-1)
    ids = jnp.broadcast_to(jnp.maximum(eos, 0)[:, None], (batch, slots, eos.shape[1]))
    scores = jnp.where((eos >= 0)[:, None], jnp.take_along_axis(log_p, ids, axis=2), -jnp.inf)
    best = jnp.argmax(scores, axis=2)[:, :, None]
    end = jnp.take_along_axis(ids, best, axis=2)
    there = jnp.any((tokens == end) & (top > -jnp.inf), axis=2, keepdims=True)
    end_p = jnp.where(there, -jnp.inf, jnp.take_along_axis(scores, best, axis=2))
    tokens = jnp.concatenate([tokens, end], axis=2).astype(jnp.int32)
    ends = ending(tokens)
    stops = ends[:, :, 0]
    first = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1), slots).astype(jnp.int32)
    return Lattice(
        tokens, jnp.concatenate([top, end_p], axis=2), ends, jnp.minimum(k, first + 1), jnp.minimum(k, first)
    )


Causal = Callable[[Array, Array], Array]
"""`(context [B, W, 2], tokens [B, C]) -> [B, W, C]`: a causal model's log-probabilities of tokens after two others."""


def best_path(given: Lattice, context: Array, causal: Causal, beams: int, weight: float) -> tuple[Array, Array]:
    """The best path that a beam search from left to right finds, and how many tokens it has.

    A path is worth the sum over its tokens of `weight log p + (1 - weight) log causal`. One that placed an end of text
    is finished: it stays in the beam with its worth and competes.

    Args:
      given: the lattice.
      context: `[B, 2]` int32, the text's last two tokens; -1 for none.
      causal: the causal model.
      beams: W, paths that are kept.
      weight: of the lattice's own distributions, in [0, 1].

    Returns:
      `[B, K]` int32, -1 after the path's end, and `[B]` int32.
    """
    batch, slots, count = given.tokens.shape
    rows = jnp.arange(batch)[:, None]

    def step(beam, slot):
        paths, worth, context, over, length = beam
        at, tokens, log_p, ends = slot
        own = weight * log_p[:, None] + (1 - weight) * causal(context, tokens)
        stays = over | (at >= given.slots)[:, None]
        grown = jnp.where((log_p > -jnp.inf)[:, None] & ~stays[:, :, None], worth[:, :, None] + own, -jnp.inf)
        every = jnp.concatenate([grown, jnp.where(stays, worth, -jnp.inf)[:, :, None]], axis=2)
        worth, chosen = jax.lax.top_k(every.reshape(batch, -1), beams)
        above, which = chosen // (count + 1), chosen % (count + 1)
        grows = which < count
        token = jnp.where(grows, jnp.take_along_axis(tokens, jnp.minimum(which, count - 1), axis=1), -1)
        ended = grows & jnp.take_along_axis(ends, jnp.minimum(which, count - 1), axis=1)
        old = context[rows, above]
        context = jnp.where(grows[:, :, None], jnp.stack([old[:, :, 1], token], axis=2), old)
        paths = paths[rows, above].at[:, :, at].set(token)
        return (paths, worth, context, over[rows, above] | ended, length[rows, above] + grows), None

    start = (
        jnp.full((batch, beams, slots), -1, jnp.int32),
        jnp.where(jnp.arange(beams) == 0, jnp.zeros((batch, 1)), -jnp.inf),
        jnp.broadcast_to(context[:, None], (batch, beams, 2)),
        jnp.zeros((batch, beams), bool),
        jnp.zeros((batch, beams), jnp.int32),
    )
    over = (jnp.arange(slots), *(jnp.moveaxis(x, 1, 0) for x in (given.tokens, given.log_p, given.ends)))
    (paths, _, _, _, length), _ = jax.lax.scan(step, start, over)
    return paths[:, 0], length[:, 0]
