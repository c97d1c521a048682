"""A few grades in place of many tokens: a rule that depends only on p / q can be made for grades, and keeps p exactly.

A token lies between the two grades next to its p / q. It gets either with a chance that makes the mean its own p / q.
So a child drawn from q, with a grade drawn for it, is a draw from a distribution q over grades; the target's
distribution over grades is that times their ratio. A rule that keeps the target's distribution over grades keeps p over
tokens, because a grade's tokens are distributed as in q.

Shapes: `B` rows, `V` tokens, `J` edges, `N` children.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

COARSE, ROUNDS = 8, 4
"""Parts of [0, k] that are looked at first, and edges that are then added one by one where they matter most."""
COUNT = COARSE + ROUNDS + 2
"""The number of grades: one for each edge, and one for tokens that no child has."""
NARROW = 1e-12


class Grades(NamedTuple):
    """The grades of rows of p and q.

    Attributes:
      edges: `[B, J]`, the p / q of every grade, from 0 to k.
      p: `[B, J + 1]`, the target's distribution over grades; the last is the part of p above k q, which no rule can let
        pass.
      q: `[B, J + 1]`, the draft's; 0 for the last.
    """

    edges: Array
    p: Array
    q: Array


def grades_of(p: Array, q: Array, drafts: Array) -> Grades:
    """Grades of distributions `[B, V]` for `drafts` `[B]` i.i.d. children, for which the best rule accepts as much as
    for tokens.

    That rule depends on the largest of E[(p / q - r)+] - K(r) over r, where a token is drawn from q and K depends on k
    alone (`penalty`). Over grades the first term is the same if r is an edge; between two edges it lies above, on a
    line. So edges are put where it seems to be the largest, until it is there: after four the loss in acceptance is
    1e-6 or less.
    """
    k = drafts[:, None]
    edges = k * (jnp.arange(COARSE + 1, dtype=p.dtype)[None] / COARSE) ** 1.5
    beyond = lambda edge: jnp.maximum(p - edge[:, None] * q, 0).sum(axis=1)
    tops = jnp.stack([beyond(edges[:, j]) for j in range(COARSE + 1)], axis=1)
    for _ in range(ROUNDS):
        edge = _worst(edges, tops, k)
        order = jnp.argsort(jnp.concatenate([edges, edge[:, None]], axis=1), axis=1)
        put = lambda old, new, order=order: jnp.take_along_axis(
            jnp.concatenate([old, new[:, None]], axis=1), order, axis=1
        )
        edges, tops = put(edges, edge), put(tops, beyond(edge))
    above = jnp.stack([q.sum(axis=1), *(part.sum(axis=1) for part in _parts(edges, p, q))], axis=1)
    share = jnp.maximum(above - jnp.pad(above[:, 1:], ((0, 0), (0, 1))), 0)
    return Grades(edges, jnp.concatenate([edges * share, tops[:, -1:]], axis=1), jnp.pad(share, ((0, 0), (0, 1))))


def grade(grades: Grades, p: Array, q: Array, uniforms: Array) -> Array:
    """The grades `[B, N]` int32, drawn with uniforms `[B, N]`, of children whose distributions are p and q `[B, N]`."""
    parts = jnp.stack(_parts(grades.edges, p, q), axis=0)
    drawn = (uniforms[None] * q[None] < parts).sum(axis=0, dtype=jnp.int32)
    return jnp.where((q > 0) | (p <= 0), drawn, grades.edges.shape[1])  # a greedy row's child is not drawn


def over_tokens(grades: Grades, shares: Array, p: Array, q: Array) -> Array:
    """By token `[B, V]`, a quantity of which each grade has `shares` `[B, J]` of its q."""
    found = shares[:, :1] * q
    for j, part in enumerate(_parts(grades.edges, p, q)):
        found += (shares[:, j + 1] - shares[:, j])[:, None] * part
    return found


def penalty(edges: Array, k: Array) -> Array:
    """K(r), the largest of 1 - (1 - Q)^k - r Q over Q in [0, 1]."""
    left = _left(edges, k)
    return 1 - left**k - edges * (1 - left)


def _left(edges: Array, k: Array) -> Array:
    """1 - Q of that Q."""
    return jnp.power(jnp.clip(edges / k, 0, 1), 1 / jnp.maximum(k - 1, 1e-6))


def _parts(edges: Array, p: Array, q: Array) -> list[Array]:
    """For every two neighbouring edges, the part of q that has at least the upper grade, each `[B, V]`."""
    widths = jnp.maximum(edges[:, 1:] - edges[:, :-1], NARROW)
    return [jnp.clip((p - edges[:, j : j + 1] * q) / widths[:, j : j + 1], 0, q) for j in range(edges.shape[1] - 1)]


def _worst(edges: Array, tops: Array, k: Array) -> Array:
    """Where on the lines through `tops` the excess over the penalty is largest, `[B]`."""
    widths = edges[:, 1:] - edges[:, :-1]
    slope = (tops[:, 1:] - tops[:, :-1]) / jnp.maximum(widths, NARROW)
    best = k * jnp.power(jnp.clip(1 + slope, 0, 1), k - 1)  # where the penalty is equally steep
    best = jnp.clip(best, edges[:, :-1], edges[:, 1:])
    value = tops[:, :-1] + slope * (best - edges[:, :-1]) - penalty(best, k)
    return jnp.take_along_axis(best, jnp.argmax(value, axis=1)[:, None], axis=1)[:, 0]
