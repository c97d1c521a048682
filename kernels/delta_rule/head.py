"""The gated delta rule for one value head, on values: what the kernels for TPUs and GPUs share.

Every token is a row, those before the block included. What is known of those is in `known`, and their strengths are 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array


def outputs(
    query: Array, key: Array, value: Array, strength: Array, log_decay: Array, known: Array, seen: Array, sums: Array,
    substituted: Callable[[Array, Array], Array],
) -> tuple[Array, Array]:  # fmt: skip
    """Outputs and corrections of A tokens, `[A, V]` each; see `api.delta_rule`.

    Args:
      query: `[A, K]`.
      key: `[A, K]`.
      value: `[A, V]`.
      strength: `[1, A]`.
      log_decay: `[1, A]`.
      known: `[A, V]`, the corrections of the tokens before the block.
      seen: `[A, A]` float32, 1 for a token's ancestors and itself.
      sums: `[K, V]`.
      substituted: solves `(1 + below) x = wanted`, from `below` `[A, A]`, 0 above and on the diagonal, and `wanted` `[A, V]`.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.int32, seen.shape, axis) for axis in (0, 1))
    own = seen * log_decay
    later = dot(own, (row > column).astype(jnp.float32))
    left = jnp.where(seen > 0, jnp.exp(later), 0.0)
    kept = jnp.exp(own.sum(axis=1))[:, None]
    strength = jnp.where(row == column, strength, 0.0).sum(axis=1)[:, None]
    below = jnp.where(row > column, strength * left * dot(key, key, 1), 0.0)
    wanted = strength * (value - kept * dot(key, sums)) + known
    made = substituted(below, wanted)
    return kept * dot(query, sums) + dot(left * dot(query, key, 1), made), made


def dot(a: Array, b: Array, axis: int = 0) -> Array:
    """The product of two matrices in float32; the last axis of `a` is summed with this axis of `b`."""
    how = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(a, b, how, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
