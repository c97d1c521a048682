"""Products by groups of inputs in XLA's own operations: one product per group, scaled and summed."""

import jax
import jax.numpy as jnp

from specjax.kernels.scaled_dot.codes import decoded

Array = jax.Array


def dot(x: Array, values: Array, scale: Array, table: tuple[float, ...] = ()) -> Array:
    """See `api.scaled_dot`."""
    (rows, inputs), (groups, outputs) = x.shape, scale.shape
    parts = jnp.einsum(
        "mgi,gif->mgf", x.reshape(rows, groups, inputs // groups), decoded(values, table, x.dtype).reshape(groups, -1, outputs),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return jnp.einsum("mgf,gf->mf", parts, scale.astype(jnp.float32))
