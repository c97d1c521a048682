"""A product of rows that are sorted by group, each with the matrix of its group.

Shapes: `R` rows, `X` groups, `E` inputs, `F` outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.few_bits import Quantised, dot, plain

Array = jax.Array

_MOST = 64  # rows that one round of the loop multiplies


def grouped_dot(x: Array, kernels: Any, sizes: Array) -> Array:
    """`jax.lax.ragged_dot`, which on a CPU multiplies every row with every matrix; there this reads those of groups with rows.

    Derivatives are those of `ragged_dot`; there are none where kernels are quantised.

    Args:
      x: `[R, E]`, sorted by group.
      kernels: `[X, E, F]`, plain or `Quantised`.
      sizes: how many rows each group has, `[X]` int32, at most R in all.

    Returns:
      `[R, F]`; what lies behind the rows of all groups is undefined.
    """
    return (_quantised_dot if isinstance(kernels, Quantised) else _plain_dot)(x, kernels, sizes)


@jax.custom_vjp
def _plain_dot(x: Array, kernels: Array, sizes: Array) -> Array:
    if _splits_matrices():
        return jax.lax.ragged_dot(x, kernels, sizes)
    return jax.lax.platform_dependent(x, kernels, sizes, cpu=looped, default=jax.lax.ragged_dot)


def _splits_matrices() -> bool:
    """Whether a mesh does, so that each round of the loop would exchange its sums."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size > 1 and not mesh.manual_axes


def _quantised_dot(x: Array, kernels: Quantised, sizes: Array) -> Array:
    """A TPU's product of groups takes int8 as it is, and of other types only matrices made plain: for those the loop is better
    there too, as long as no mesh splits them."""
    taken = kernels.values.dtype == jnp.int8 and kernels.scale.shape[1] == 1
    if _splits_matrices():
        return _scaled(x, kernels, sizes) if taken else jax.lax.ragged_dot(x, plain(kernels, x.dtype), sizes)
    if not taken:
        return looped(x, kernels, sizes)
    return jax.lax.platform_dependent(x, kernels, sizes, cpu=looped, default=_scaled)


def _scaled(x: Array, kernels: Quantised, sizes: Array) -> Array:
    """The product with the stored values, times the scale of each row's group."""
    product = jax.lax.ragged_dot(x, kernels.values, sizes, preferred_element_type=jnp.float32)
    scale = jnp.repeat(kernels.scale[:, 0].astype(jnp.float32), sizes, axis=0, total_repeat_length=x.shape[0])
    return (product * scale).astype(x.dtype)


def looped(x: Array, kernels: Any, sizes: Array) -> Array:
    """`grouped_dot` as a loop over the groups that have rows, a few rows at a time.

    A round multiplies a slice of one width, whose first rows are of one group, and writes all of it. The next begins where
    that group's rows end, so that whatever was written for rows of other groups is overwritten.
    """
    rows, wide = x.shape[0], _width(x.shape[0], kernels.shape[0])
    ends = jnp.cumsum(sizes)
    padded = jnp.pad(x, ((0, wide), (0, 0)))

    def part(state):
        at, out = state
        group = jnp.searchsorted(ends, at, side="right")
        kernel = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, group, keepdims=False), kernels)
        product = dot(jax.lax.dynamic_slice_in_dim(padded, at, wide), kernel)
        return jnp.minimum(at + wide, ends[group]), jax.lax.dynamic_update_slice_in_dim(out, product, at, 0)

    out = jnp.zeros((rows + wide, kernels.shape[2]), x.dtype)
    return jax.lax.while_loop(lambda state: state[0] < ends[-1], part, (jnp.zeros_like(ends[0]), out))[1][:rows]


def _width(rows: int, groups: int) -> int:
    """Of a slice: a power of two that holds twice the rows of a mean group."""
    return min(_MOST, 1 << (max(1, 2 * rows // groups) - 1).bit_length())


def _forward(x, kernels, sizes):
    return _plain_dot(x, kernels, sizes), (x, kernels, sizes)


def _backward(kept, above):
    x, kernels, sizes = kept
    return *jax.vjp(lambda x, kernels: jax.lax.ragged_dot(x, kernels, sizes), x, kernels)[1](above), None


_plain_dot.defvjp(_forward, _backward)
