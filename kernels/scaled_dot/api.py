"""The entry point of products by groups of inputs, which chooses an implementation when a program is lowered."""

import functools

import jax
import jax.numpy as jnp

from specjax.kernels.gpu import has_triton
from specjax.kernels.products import by_platform, split
from specjax.kernels.scaled_dot import xla

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def scaled_dot(x: Array, values: Array, scale: Array, table: tuple[float, ...] = ()) -> Array:
    """`x` times a matrix of few bits, in which groups of adjacent inputs share a scale; only `x` has derivatives.

    In the shape descriptions `M` denotes rows, `E` inputs, `F` outputs, `G` groups of inputs.

    Args:
      x: `[M, E]`.
      values: `[E, F]` of int8, int4, uint4, float4 (e2m1) or float8.
      scale: `[G, F]`.
      table: the number that each of 16 values stands for; empty: the value itself.

    Returns:
      `[M, F]` in float32.
    """
    if split():  # nothing partitions a kernel
        return xla.dot(x, values, scale, table)
    return _dot(table)(x, values, scale)


def scaled_dot_of(x: Array, values: Array, group: Array, scale: Array, table: tuple[float, ...] = ()) -> Array:
    """`scaled_dot` with one of several matrices; the others are not read, and there are no derivatives.

    Args:
      x: `[M, E]`.
      values: `[X, E, F]`.
      group: which of the X matrices, an int32.
      scale: `[G, F]`, that matrix's scales.
      table: see `scaled_dot`.
    """
    if split():
        return xla.dot(x, _one(values, group), scale, table)
    return _dot_of(table)(x, values, group, scale)


def _one(values, group):
    return jax.lax.dynamic_index_in_dim(values, group, keepdims=False)


def _cuda_of(x, values, group, scale, table):
    from specjax.kernels.scaled_dot import gpu  # Pallas takes long to import

    if not (has_triton() and gpu.takes(values[0], scale)):
        return xla.dot(x, _one(values, group), scale, table)
    return gpu.dot(x, values, scale, table, group=group)


def _cuda(x, values, scale, table):
    if not has_triton():
        return xla.dot(x, values, scale, table)
    from specjax.kernels.scaled_dot import gpu  # Pallas takes long to import

    return (gpu if gpu.takes(values, scale) else xla).dot(x, values, scale, table)


def _cpu(x, values, scale, table):
    # on a CPU, XLA lacks grouped bfloat16 products for some shapes, and widens the others
    return xla.dot(x.astype(jnp.float32), values, scale, table)


def _forward(x, values, scale, table):
    return scaled_dot(x, values, scale, table), (x, values, scale)


def _backward(table, kept, above):
    x, values, scale = kept
    return *jax.vjp(lambda x: xla.dot(x, values, scale, table), x)[1](above), None, None


scaled_dot.defvjp(_forward, _backward)


@functools.cache
def _dot(table: tuple[float, ...]):
    """The operation for codes with this table."""
    with_table = lambda way: functools.partial(way, table=table)
    return by_platform(
        "scaled_dot",
        lambda x, values, _: jax.core.ShapedArray((x.shape[0], values.shape[1]), jnp.float32),
        {"cpu": with_table(_cpu), "cuda": with_table(_cuda)},
        with_table(xla.dot),
    )


@functools.cache
def _dot_of(table: tuple[float, ...]):
    """The same with one of several matrices."""
    sliced = lambda way: lambda x, values, group, scale: way(x, _one(values, group), scale, table)
    return by_platform(
        "scaled_dot_of",
        lambda x, values, group, scale: jax.core.ShapedArray((x.shape[0], values.shape[2]), jnp.float32),
        {"cpu": sliced(_cpu), "cuda": functools.partial(_cuda_of, table=table)},
        sliced(xla.dot),
    )
