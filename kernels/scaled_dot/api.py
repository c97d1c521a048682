"""The one door to products by groups of inputs: picks an implementation when a program is lowered."""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from specjax.kernels.grouped_dot import split
from specjax.kernels.precision import setting
from specjax.kernels.scaled_dot import xla

Array = jax.Array


@jax.custom_vjp
def scaled_dot(x: Array, values: Array, scale: Array) -> Array:
    """`x` times a matrix of few bits, each scale being that of as many neighbouring inputs as there are more of them. There are
    derivatives by `x` alone.

    In the shape descriptions `M` denotes rows, `E` inputs, `F` outputs, `G` groups of inputs.

    Args:
      x: `[M, E]`.
      values: `[E, F]` of int8, int4 or float8.
      scale: `[G, F]`.

    Returns:
      `[M, F]` in float32.
    """
    if split():  # nobody partitions a kernel
        return xla.dot(x, values, scale)
    return scaled_dot_p.bind(x, values, scale, precision=setting())


def _triton(x, values, scale):
    from specjax.kernels.scaled_dot import gpu  # Pallas takes long to import

    return (gpu if gpu.takes(values, scale) else xla).dot(x, values, scale)


def _forward(x, values, scale):
    return scaled_dot(x, values, scale), (x, values, scale)


def _backward(kept, above):
    x, values, scale = kept
    return *jax.vjp(lambda x: xla.dot(x, values, scale), x)[1](above), None, None


scaled_dot.defvjp(_forward, _backward)

scaled_dot_p = Primitive("scaled_dot")
scaled_dot_p.def_impl(jax.jit(scaled_dot_p.bind, static_argnames="precision"))
scaled_dot_p.def_abstract_eval(
    lambda x, values, _, **__: jax.core.ShapedArray((x.shape[0], values.shape[1]), jnp.float32)
)


def _lower(ctx, *given, way, precision):
    with jax.default_matmul_precision(precision):  # as it was where the product was traced
        return mlir.lower_fun(way, multiple_results=False)(ctx, *given)


def _batch(given, axes, *, precision):
    """Under `jax.vmap`: XLA's operations, which any mapped axis may stand before."""
    with jax.default_matmul_precision(precision):
        return jax.vmap(xla.dot, in_axes=axes)(*given), 0


batching.primitive_batchers[scaled_dot_p] = _batch
mlir.register_lowering(scaled_dot_p, functools.partial(_lower, way=xla.dot))
mlir.register_lowering(scaled_dot_p, functools.partial(_lower, way=_triton), platform="cuda")
