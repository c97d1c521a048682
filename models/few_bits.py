"""Matrices whose numbers have few bits: the leaf for one in a params pytree, and products with it.

A product multiplies the stored values, widened on their way into the matrix unit, and scales the result. Where a
channel has one scale, this is one product. Otherwise it is one product per group of inputs, and the scaled products are
summed. So no compiler has a reason to write a whole matrix to memory in another type. The compilers for TPUs and GPUs
both do that when the values are scaled first.

Shapes: `E` inputs, `F` outputs, `G` groups of inputs that share scales, 1 where a channel has one.

A packed matrix (`specjax.models.packed_matrix`) is multiplied in the same way, and its added minima are multiplied by
the sums of each group's inputs. A matrix with coded exponents (`specjax.models.dfloat11`) is decoded just before it is
multiplied, one matrix at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.precision import by_tensor_cores
from specjax.kernels.scaled_dot import scaled_dot, scaled_dot_of
from specjax.models.dfloat11 import Coded
from specjax.models.matrix import Matrix
from specjax.models.packed_matrix import Packed, repeated
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import parts

Array = jax.Array

_ROWS = 8
"""Sublanes of a tile."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised(Matrix):
    """The matrix `values * scale`. Each scale covers a group of adjacent values along the axis of the inputs.

    Attributes:
      scale: `[..., G, F]` of a kernel, `[V, G]` of a table of embeddings; in the type of the other parameters.
      values: `[..., E, F]`, or `[V, E]`; int8, int4 or float8.
    """

    scale: Any
    values: Any

    @property
    def stored(self) -> Any:
        return self.values

    def astype(self, dtype: Any) -> "Quantised":
        return Quantised(self.scale.astype(dtype), self.values)

    def numbers(self) -> Array:
        return self.values.astype(jnp.float32) * repeated(self.scale.astype(jnp.float32), self.values.shape)


def is_quantised(x: Any) -> bool:
    """Whether a node of a params pytree stands for a matrix (a `Quantised`, `Packed` or `Coded`); for use as
    `is_leaf`."""
    return isinstance(x, Matrix)


def plain(x: Any, dtype: Any = None) -> Any:
    """The matrix as one array, in its own type or in `dtype`. A plain array is returned as it is."""
    kind = x.dtype if dtype is None else dtype
    return (x.numbers() if is_quantised(x) else x).astype(kind)


def dot(x: Array, kernel: Any, dtype: Any = None) -> Array:
    """`x @ kernel`.

    Args:
      x: `[..., E]`.
      kernel: `[E, F]`, plain, `Quantised`, `Packed` or `Coded`.
      dtype: the type of the product; None: the type of `x`.

    Returns:
      `[..., F]`.
    """
    kind = x.dtype if dtype is None else dtype
    product = lambda x: by_tensor_cores(lambda x: _dot(x, kernel, kind), x, kernel.dtype)
    return padded_rows(product, x)


def _dot(x, kernel, dtype):
    last = (((x.ndim - 1,), (0,)), ((), ()))
    if isinstance(kernel, Coded):
        kernel = kernel.numbers(x)
    if not is_quantised(kernel):
        return jax.lax.dot_general(x, kernel.astype(x.dtype), last, preferred_element_type=dtype)
    rows, outputs = math.prod(x.shape[:-1]), kernel.shape[1]
    if isinstance(kernel, Packed):
        product = _packed_dot(x.reshape(rows, -1), kernel)
    elif kernel.scale.shape[0] == 1:
        product = jax.lax.dot_general(x, kernel.values.astype(x.dtype), last, preferred_element_type=jnp.float32)
        product = product * kernel.scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (outputs,))
    else:
        product = scaled_dot(x.reshape(rows, -1), kernel.values, kernel.scale)
    return product.reshape(*x.shape[:-1], outputs).astype(dtype)


def dot_of(x: Array, kernels: Any, group: Array) -> Array:
    """Rows `[M, E]` times one of several matrices `[X, E, F]`, in whatever form: `[M, F]`."""
    product = functools.partial(_dot_of, kernels=kernels, group=group, dtype=x.dtype)
    return by_tensor_cores(product, x, kernels.dtype)


def _dot_of(x, kernels, group, dtype):
    one = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, group, keepdims=False)
    if isinstance(kernels, Packed):
        scale, added = jax.tree.map(one, dataclasses.replace(kernels, values=None)).factors()
        return _with_added(x, scaled_dot_of(x, kernels.values, group, scale, kernels.table), added).astype(dtype)
    if isinstance(kernels, Quantised) and kernels.scale.shape[1] > 1:
        return scaled_dot_of(x, kernels.values, group, one(kernels.scale)).astype(dtype)
    return dot(x, jax.tree.map(one, kernels), dtype)


def _packed_dot(x: Array, kernel: Packed) -> Array:
    """Rows `[M, E]` times a matrix, `[M, F]` in float32."""
    scale, added = kernel.factors()
    return _with_added(x, scaled_dot(x, kernel.values, scale, kernel.table), added)


def _with_added(x: Array, product: Array, added: Array | None) -> Array:
    """A float32 product `[M, F]` plus the product with the numbers added to each group, `[G, F]`."""
    if added is None:
        return product
    sums = x.astype(jnp.float32).reshape(x.shape[0], added.shape[0], -1).sum(axis=-1)
    return product + jnp.dot(sums, added, precision=jax.lax.Precision.HIGHEST)


def scores(h: Array, kernel: Any) -> Array:
    """The product of features `[B, T, E]` and an output head `[E, V]` in any form: `[B, T, V]` in float32."""
    if isinstance(kernel, Coded):
        return scores(h, kernel.numbers(h).astype(kernel.dtype))
    if is_quantised(kernel):
        return dot(h, kernel, jnp.float32)
    product = lambda h: jnp.einsum("bte,ev->btv", h, kernel, preferred_element_type=jnp.float32)
    return padded_rows(lambda h: by_tensor_cores(product, h, kernel.dtype), h)


def padded_rows(product: Callable[[Array], Array], x: Array) -> Array:
    """A product with `x` `[B, T, E]`; on TPUs one row per device is padded to eight.

    A TPU's compiler gives a product of one row to the vector units. By its own estimate, these take four times as long
    for a large matrix as reading it takes. Where a mesh splits the inputs, all eight rows are summed over the mesh.

    Args:
      product: `[B, T, F]` of `[B, T, E]`, row by row.
      x: the operand; unchanged if it has more rows or other axes.
    """
    rows = parts(known_mesh(), "batch")
    if x.ndim != 3 or x.shape[1] != 1 or x.shape[0] not in (1, rows):
        return product(x)

    def padded(x):
        wide = jnp.pad(x, ((0, 0), (0, _ROWS - 1), (0, 0)))
        return product(jax.lax.optimization_barrier(wide))[:, :1]

    return jax.lax.platform_dependent(x, tpu=padded, default=product)


def rows(table: Any, ids: Array) -> Array:
    """The rows `ids` `[...]` of a table `[V, E]`, in whatever form: `[..., E]`. Every id must be in range."""
    if not is_quantised(table):
        return table.at[ids].get(mode="promise_in_bounds")
    return plain(table.take(ids.reshape(-1))).reshape(*ids.shape, -1)


def embedded(table: Any, tokens: Array, vocab_size: int) -> Array:
    """Embeddings `[..., E]` of ids `[...]` by a table `[V, E]`, in whatever form.

    They are float32, like the residual stream that they begin, so that the first norm rounds nothing. Ids outside the
    vocabulary are read as token 0, even where the table is padded beyond it.
    """
    known = (tokens >= 0) & (tokens < vocab_size)
    return rows(table, jnp.where(known, tokens, 0)).astype(jnp.float32)
