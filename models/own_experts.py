"""Experts of which a device holds some whole ones: it computes the rows of those alone, some at a time.

A row is a token and one of its experts. Shapes: `M` tokens, `E` width, `k` experts per token, `R = M k` rows, `W` rows of
a turn.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.precision import full_einsum

Array = jax.Array
Apply = Callable[[Any, Array, Array], Array]
Whole = Callable[[Any, Array, Array, Array], Array]

SCOPE = "rows_by_turns"
"""The scope of the loop over turns, by which a plan recognises it."""
_TILE = 16  # rows that a tile of bfloat16 has
_TOKENS = 512  # with more of them, rows are sorted, since all pairs are too many
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
    for, that device takes more turns, so that no row is dropped. Derivatives are those of `whole`.

    On a GPU, a loop would wait for the host in every turn. There, for more than 512 tokens, and where W is not below R, the
    sum is `whole`.

    Args:
      apply: an MLP of parameters, rows `[W, ...]` sorted by expert, and the number of each own expert's rows; it gives
        `[W, E]`, of which rows after those of all own experts are undefined.
      whole: the same sum from arrays of R rows, a function like the result.
      number: how many experts a device holds.
      parts: over how many devices the experts lie.
      inputs: whether the weights multiply what experts read, and not what they give.

    Returns:
      A function of parameters, what experts read of tokens `[M, ...]`, weights `[M, k]` in float32 and experts `[M, k]`. The
      device's own are those below `number`. It returns `[M, E]`.
    """

    def chosen(params, x, weights, experts):
        wide = turn(experts.size, parts)
        if wide >= experts.size or len(experts) > _TOKENS:
            return whole(params, x, weights, experts)
        own = lambda *given: _turns(apply, number, parts, wide, inputs, *given)
        return jax.lax.platform_dependent(params, x, weights, experts, cuda=whole, default=own)

    def backward(kept, above):
        own = lambda params, x, weights: whole(params, x, weights, kept[-1])
        return *jax.vjp(own, *kept[:-1])[1](above), None

    summed = jax.custom_vjp(chosen)
    summed.defvjp(lambda *given: (chosen(*given), given), backward)
    return summed


def _turns(apply, number, parts, wide, inputs, params, x, weights, experts):
    """See `in_turns`. Rows find their places by comparing all pairs, which for so few tokens takes a chip fewer operations
    than sorting, and come to their tokens by a product of zeros and ones. What is not finite stays out of that product,
    and makes its own token NaN."""
    (tokens, each), chosen = experts.shape, experts.reshape(-1)
    at, token = jnp.arange(chosen.size), np.arange(chosen.size) // each
    before = (chosen[None] < chosen[:, None]) | ((chosen[None] == chosen[:, None]) & (at[None] < at[:, None]))
    place = jnp.sum(before, axis=1)  # of every row, when they are sorted by expert
    begins, ends = (jnp.sum(chosen[None] < jnp.arange(number)[:, None] + more, axis=1) for more in (0, 1))
    count = ends[-1]

    def one(state):
        start, out = state
        end, rows = jnp.minimum(start + wide, count), start + jnp.arange(wide)
        filled, here = rows < end, place[None] == rows[:, None]  # [W], [W, R]
        of = jnp.sum(jnp.where(here, token[None], 0), axis=1)
        weight = jnp.sum(jnp.where(here, weights.reshape(1, -1), 0), axis=1)[:, None]
        read = x[of] * weight.astype(x.dtype) if inputs else x[of]
        made = apply(params, read, jnp.clip(ends, start, end) - jnp.clip(begins, start, end)).astype(jnp.float32)
        made = made if inputs else made * weight
        finite = jnp.all(jnp.isfinite(made), axis=1)
        mine = filled[:, None] & (of[:, None] == jnp.arange(tokens)[None])  # [W, M]
        kept = jnp.where((filled & finite)[:, None], made, 0)
        added = full_einsum("wm,we->me", mine.astype(jnp.float32), kept)
        lost = jnp.any(mine & ~finite[:, None], axis=0)
        return end, out + jnp.where(lost[:, None], jnp.nan, added)

    with jax.named_scope(SCOPE):
        rows = jax.ShapeDtypeStruct((wide, x.shape[1]), x.dtype), jax.ShapeDtypeStruct((number,), ends.dtype)
        width = jax.eval_shape(apply, params, *rows).shape[1]
        begin = jnp.zeros((), ends.dtype), jnp.zeros((tokens, width), jnp.float32)
        return jax.lax.while_loop(lambda state: state[0] < count, one, begin)[1].astype(x.dtype)
