"""Experts of which a device holds some whole ones: it computes the rows of those alone, some at a time.

A row is a token and one of its experts. Shapes: `M` tokens, `E` width, `k` experts per token, `R = M k` rows, `W` rows of
a turn.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Apply = Callable[[Any, Array, Array], Array]
Whole = Callable[[Any, Array, Array, Array], Array]

SCOPE = "rows_by_turns"
"""The scope of the loop over turns, by which a plan recognises it."""
_TILE = 16  # rows that a tile of bfloat16 has
_ROOM = 2  # a turn has room for this many times the rows of an even share


def turn(rows: int, parts: int) -> int:
    """W: twice a device's even share of R rows over `parts` devices, in whole tiles.

    >>> turn(640, 16), turn(80, 16), turn(48, 4)
    (80, 16, 32)
    """
    return -(-_ROOM * rows // (parts * _TILE)) * _TILE


def in_turns(apply: Apply, whole: Whole, number: int, parts: int, inputs: bool) -> Whole:
    """A device's part of the sum over experts.

    The program's arrays have W rows and not R. If the tokens choose one device's experts more often than its turn has room
    for, that device takes more turns, so that no row is dropped. A token's rows are added in the order of its experts, so
    the sum does not depend on the turns. Derivatives are those of `whole`.

    On a GPU, a loop would wait for the host in every turn. There, and where W is not below R, the sum is `whole`.

    Args:
      apply: an MLP of parameters, rows `[W, E]` sorted by expert, and the number of each own expert's rows; it gives
        `[W, E]`, of which rows after those of all own experts are undefined.
      whole: the same sum from arrays of R rows, a function like the result.
      number: how many experts a device holds.
      parts: over how many devices the experts lie.
      inputs: whether the weights multiply what experts read, and not what they give.

    Returns:
      A function of parameters, tokens `[M, E]`, weights `[M, k]` in float32 and experts `[M, k]` int32, of which the
      device's own are those below `number`. It returns `[M, E]`.
    """

    def chosen(params, x, weights, experts):
        wide = turn(experts.size, parts)
        if wide >= experts.size:
            return whole(params, x, weights, experts)
        own = lambda *given: _turns(apply, number, parts, wide, inputs, *given)
        return jax.lax.platform_dependent(params, x, weights, experts, cuda=whole, default=own)

    def backward(kept, above):
        *given, experts = kept
        return *jax.vjp(lambda *given: whole(*given, experts), *given)[1](above), None

    summed = jax.custom_vjp(chosen)
    summed.defvjp(lambda *given: (chosen(*given), given), backward)
    return summed


def _turns(apply, number, parts, wide, inputs, params, x, weights, experts):
    """See `in_turns`."""
    (tokens, each), rows = experts.shape, experts.size
    order = jnp.argsort(experts.reshape(-1), stable=True)
    ends = jnp.cumsum(jnp.zeros((number,), jnp.int32).at[experts.reshape(-1)].add(1, mode="drop"))
    # a token's rows in the order of their experts, and the most of them that it adds in one turn
    place, weight = jax.lax.sort((jnp.argsort(order).reshape(tokens, each), weights), dimension=1, num_keys=1)
    most = min(each, math.ceil(_ROOM * each / parts) + 2)
    place, weight = (jnp.pad(a, ((0, 0), (0, most + 1)), constant_values=rows) for a in (place, weight))
    order = jnp.pad(order, (0, wide))

    def one(state):
        start, out = state
        first = jnp.sum(place < start, axis=1, keepdims=True) + jnp.arange(most + 1)[None]
        found, by = jnp.take_along_axis(place, first, axis=1), jnp.take_along_axis(weight, first, axis=1)
        end = jnp.minimum(jnp.minimum(start + wide, ends[-1]), jnp.min(found[:, most]))
        sizes = jnp.diff(jnp.clip(ends, start, end), prepend=start)
        here = jax.lax.dynamic_slice_in_dim(order, start, wide)
        read = x[here // each]
        read = read * weights.reshape(-1)[here][:, None].astype(x.dtype) if inputs else read
        made = apply(params, read, sizes)
        at = jnp.clip(found[:, :most] - start, 0, wide - 1)
        for i in range(most):
            mine = made[at[:, i]].astype(jnp.float32)
            mine = mine if inputs else mine * by[:, i, None]
            out = out + jnp.where(found[:, i, None] < end, mine, 0)
        return end, out

    with jax.named_scope(SCOPE):
        begin = jnp.zeros((), ends.dtype), jnp.zeros(x.shape, jnp.float32)
        return jax.lax.while_loop(lambda state: state[0] < ends[-1], one, begin)[1].astype(x.dtype)
