"""The ring in which queries travel and keys stay, inside `shard_map` (TokenRing, Wang et al. 2024, arXiv:2412.20501).

Queries go one way. What each device found for them goes straight back to their owner, the other way, while the next ones are
read. In a causal sequence of 2 n chunks device r owns the chunks r and 2 n - 1 - r, so that all devices do equal work.

In the shape descriptions `M` denotes the queries of one kv-head, of both chunks of a device, `S` its keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import MASKED, Found, nothing

Array = jax.Array
Read = Callable[[Found, Array, Array, Array, Callable[[Array], Array]], Found]
"""From a result, queries, keys, values, and which keys are seen to the result with these keys."""


def full(axis: str, queries: Array, key: Array, value: Array, read: Read, seen: Any) -> Found:
    """Every query `[B, K, M, H]` over the keys `[B, K, S, H]` of all devices that are `seen`."""
    count = jax.lax.axis_size(axis)
    home = read(nothing(queries.shape), queries, key, value, seen)
    for step in range(1, count):
        queries = jax.lax.ppermute(queries, axis, _shifted(count, -1))
        found = read(nothing(queries.shape), queries, key, value, seen)
        home = together(home, returned(axis, found, _shifted(count, step)))
    return home


def causal(axis: str, queries: Array, key: Array, value: Array, read: Read) -> Found:
    """Every query over its own key and those before it; parts of the sequence are contiguous, with as many queries as keys."""
    count, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    early, late = zigzag(axis, queries)
    (early_key, late_key), (early_value, late_value) = zigzag(axis, key), zigzag(axis, value)
    every = lambda index: jnp.ones((1, 1, index.shape[0]), bool)
    size = early_key.shape[2]
    first = jnp.array([1, 0]) * me * size + jnp.array([0, 1]) * (2 * count - 1 - me) * size
    at = lambda index: first[index // size] + index % size
    before = lambda index: at(index)[None, None] <= at(jnp.arange(2 * size))[None, :, None]
    both = lambda early, late: jnp.concatenate([early, late], axis=2)
    own = both(early, late), both(early_key, late_key), both(early_value, late_value)
    halves = [jnp.split(leaf, 2, axis=2) for leaf in read(nothing(own[0].shape), *own, before)]
    home_early, home_late = (Found(*part) for part in zip(*halves, strict=True))
    for step in range(1, count):
        # the first chunk of a later owner sees nothing here, so it is not sent to those that come before it
        early = jax.lax.ppermute(early, axis, [(i + 1, i) for i in range(count - step)])
        late = jax.lax.ppermute(late, axis, _shifted(count, -1))
        pick = functools.partial(_picked, me >= count - step)
        of_late = read(nothing(late.shape), late, early_key, early_value, every)
        other = pick(late, early), pick(late_key, early_key), pick(late_value, early_value)
        more = read(pick(of_late, nothing(late.shape)), *other, every)
        ahead = returned(axis, more, [(i, i + step) for i in range(count - step)], me >= step)
        home_early = together(home_early, ahead)
        home_late = together(home_late, returned(axis, pick(more, of_late), _shifted(count, step)))
    joined = [both(a, b) for a, b in zip(home_early, home_late, strict=True)]
    return Found(*(contiguous(axis, leaf) for leaf in joined))


def _picked(which: Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), yes, no)


def returned(axis: str, found: Found, places: list[tuple[int, int]], arrives: Array | bool = True) -> Found:
    """Results on their way home: the attention and its log-sum-exp, float32; nothing where none `arrives`."""
    worth = found.peak + jnp.log(jnp.maximum(found.total, 1e-30))
    out, worth = jax.lax.ppermute((found.sums / jnp.maximum(found.total, 1e-30), worth), axis, places)
    return Found(jnp.where(arrives, worth, MASKED), jnp.where(arrives, jnp.ones_like(worth), 0.0), out)


def together(one: Found, other: Found) -> Found:
    """The result over the keys of both."""
    peak = jax.lax.stop_gradient(jnp.maximum(one.peak, other.peak))
    a, b = jnp.exp(one.peak - peak), jnp.exp(other.peak - peak)
    return Found(peak, one.total * a + other.total * b, one.sums * a + other.sums * b)


def zigzag(axis: str, x: Array) -> tuple[Array, Array]:
    """The chunks r and 2 n - 1 - r of an array `[B, K, 2 C, H]` whose parts are contiguous, on device r."""
    even, odd = _zigzag_places(jax.lax.axis_size(axis))
    first, second = jnp.split(x, 2, axis=2)
    first, second = jax.lax.ppermute(first, axis, even), jax.lax.ppermute(second, axis, odd)
    alike = jax.lax.axis_index(axis) % 2 == 0
    return jnp.where(alike, first, second), jnp.where(alike, second, first)


def contiguous(axis: str, x: Array) -> Array:
    """Undoes `zigzag`."""
    even, odd = ([(there, here) for here, there in places] for places in _zigzag_places(jax.lax.axis_size(axis)))
    early, late = jnp.split(x, 2, axis=2)
    alike = jax.lax.axis_index(axis) % 2 == 0
    first, second = jnp.where(alike, early, late), jnp.where(alike, late, early)
    return jnp.concatenate([jax.lax.ppermute(first, axis, even), jax.lax.ppermute(second, axis, odd)], axis=2)


def _zigzag_places(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """From which device to which the chunks of even and of odd numbers go."""
    owner = lambda chunk: min(chunk, 2 * count - 1 - chunk)
    return [(r, owner(2 * r)) for r in range(count)], [(r, owner(2 * r + 1)) for r in range(count)]


def _shifted(count: int, by: int) -> list[tuple[int, int]]:
    return [(i, (i + by) % count) for i in range(count)]
