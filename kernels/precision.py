"""The precision of products: what is asked for, and what tensor cores are given."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_USUAL = (None, "default", "fastest", "bfloat16")  # names of the precision of a single matrix-unit product


def setting(name: str = "jax_default_matmul_precision") -> str | None:
    """The value of a JAX setting; by default, that of `jax.default_matmul_precision`."""
    return getattr(jax.config, name)


def is_usual() -> bool:
    """Whether a matrix unit's default precision is enough."""
    return setting() in _USUAL


def full_einsum(how: str, *operands: jax.Array) -> jax.Array:
    """`jnp.einsum` of float32 operands in full precision, as sums over a whole text need it."""
    return jnp.einsum(how, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def by_tensor_cores(product: Callable[[jax.Array], jax.Array], x: jax.Array, dtype: Any) -> jax.Array:
    """`product(x)`. On an NVIDIA GPU, float32 rows are rounded to bfloat16 first if the matrix is used in bfloat16.

    A TPU rounds them by itself on their way into the matrix unit. Tensor cores would take both operands as TF32, for
    which the matrix is widened: on an H200, a step of 128 rows then took 14 times as long as reading the model. A
    higher `jax.default_matmul_precision` than the usual one keeps the rows as they are.

    Args:
      product: its result has the same type whatever the type of its argument.
      x: the rows.
      dtype: the type in which the matrix is used.
    """
    if x.dtype != jnp.float32 or dtype != jnp.bfloat16 or not is_usual():
        return product(x)
    rounded = lambda x: product(x.astype(jnp.bfloat16))
    return jax.lax.platform_dependent(x, cuda=rounded, default=product)
