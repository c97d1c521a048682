"""Coded exponents in plain XLA: all lanes of a matrix in parallel, four codes of each at a time."""

import jax
import jax.numpy as jnp

Array = jax.Array

LONGEST = 8
"""Bits of a code."""
FOUR = 32 // LONGEST
"""The number of codes that surely fit in a window of 32 bits."""


def numbers(rest: Array, codes: Array, table: Array) -> Array:
    """See `api.numbers`."""
    one = _numbers
    for _ in rest.shape[:-2]:
        one = jax.vmap(one)
    return one(rest, codes, table)


def _numbers(rest, codes, table):
    words, runs, outputs = codes.shape
    count = rest.shape[0] // runs
    entries = table.reshape(-1)

    def read(at, _):
        word = at >> 5
        places = (jnp.minimum(word + i, words - 1)[None] for i in (0, 1))
        first, second = (jnp.take_along_axis(codes, place, axis=0)[0] for place in places)
        bits, found = window(first, second, at), []
        for _ in range(FOUR):
            entry = entries.at[bits >> (32 - LONGEST)].get(mode="promise_in_bounds")
            length = (entry >> 8).astype(jnp.uint32)
            found.append(entry.astype(jnp.uint8))
            bits, at = bits << length, at + length.astype(jnp.int32)
        return at, jnp.stack(found)

    start = jnp.zeros((runs, outputs), jnp.int32)
    _, exponents = jax.lax.scan(read, start, None, length=-(-count // FOUR))
    exponents = exponents.reshape(-1, runs, outputs)[:count].swapaxes(0, 1).reshape(rest.shape)
    wide = exponents.astype(jnp.uint16)
    # widened together: alone, `rest` would be widened before a loop over steps and kept by it
    kept = (rest ^ exponents).astype(jnp.uint16) ^ wide
    return jax.lax.bitcast_convert_type(joined(kept, wide), jnp.bfloat16)


def window(first: Array, second: Array, at: Array) -> Array:
    """The 32 bits after a place, from its word and the next one."""
    bit = (at & 31).astype(jnp.uint32)
    return first << bit | second >> 1 >> (31 - bit)  # no shift by 32, which is undefined


def joined(rest: Array, exponents: Array) -> Array:
    """The bits of a number, from its separately stored parts."""
    return (rest & 0x80) << 8 | exponents << 7 | rest & 0x7F
