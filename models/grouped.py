"""A product of rows that are sorted by group, each with the matrix of its group.

Shapes: `R` rows, `X` groups, `E` inputs, `F` outputs.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

_MOST = 64  # rows that one round of the loop multiplies


@jax.custom_vjp
def grouped_dot(x: Array, kernels: Array, sizes: Array) -> Array:
    """`jax.lax.ragged_dot`, which on a CPU multiplies every row with every matrix; there this reads those of groups with rows.

    Derivatives are those of `ragged_dot`.

    Args:
      x: `[R, E]`, sorted by group.
      kernels: `[X, E, F]`.
      sizes: how many rows each group has, `[X]` int32, at most R in all.

    Returns:
      `[R, F]`; what lies behind the rows of all groups is undefined.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # where a mesh splits matrices, each round of the loop would exchange its sums
    if mesh.size > 1 and not mesh.manual_axes:
        return jax.lax.ragged_dot(x, kernels, sizes)
    return jax.lax.platform_dependent(x, kernels, sizes, cpu=looped, default=jax.lax.ragged_dot)


def looped(x: Array, kernels: Array, sizes: Array) -> Array:
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
        kernel = jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)
        product = jax.lax.dynamic_slice_in_dim(padded, at, wide) @ kernel
        return jnp.minimum(at + wide, ends[group]), jax.lax.dynamic_update_slice_in_dim(out, product, at, 0)

    out = jnp.zeros((rows + wide, kernels.shape[2]), x.dtype)
    return jax.lax.while_loop(lambda state: state[0] < ends[-1], part, (jnp.zeros_like(ends[0]), out))[1][:rows]


def _width(rows: int, groups: int) -> int:
    """Of a slice: a power of two that holds twice the rows of a mean group."""
    return min(_MOST, 1 << (max(1, 2 * rows // groups) - 1).bit_length())


def _forward(x, kernels, sizes):
    return grouped_dot(x, kernels, sizes), (x, kernels, sizes)


def _backward(kept, above):
    x, kernels, sizes = kept
    return *jax.vjp(lambda x, kernels: jax.lax.ragged_dot(x, kernels, sizes), x, kernels)[1](above), None


grouped_dot.defvjp(_forward, _backward)
