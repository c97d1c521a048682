"""The one door to grouped products: picks an implementation when a program is lowered.

Nothing is traced for platforms that the program is not compiled for.
"""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from specjax.kernels.grouped_dot import loop, tpu
from specjax.kernels.precision import setting

Array = jax.Array


@jax.custom_vjp
def grouped_dot(x: Array, kernels: Array, sizes: Array) -> Array:
    """`jax.lax.ragged_dot`, which reads the matrices of all groups on a CPU and on a GPU; there this reads those with rows.

    Derivatives are those of `ragged_dot`. In the shape descriptions `R` denotes rows, `X` groups, `E` inputs, `F` outputs.

    Args:
      x: `[R, E]`, sorted by group.
      kernels: `[X, E, F]`.
      sizes: how many rows each group has, `[X]` int32, at most R in all.

    Returns:
      `[R, F]` in the type of `x`; what lies behind the rows of all groups is undefined.
    """
    if split():
        return _ragged(x, kernels, sizes)
    return grouped_dot_p.bind(x, kernels, sizes, precision=setting())


def split() -> bool:
    """Whether a mesh splits matrices: a loop would exchange its sums in each round then, and nobody partitions a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size > 1 and not mesh.manual_axes


def _ragged(x, kernels, sizes):
    return jax.lax.ragged_dot(x, kernels, sizes).astype(x.dtype)


def _triton(x, kernels, sizes):
    from specjax.kernels.grouped_dot import gpu  # Pallas takes long to import

    return gpu.dot(x, kernels, sizes)


def _forward(x, kernels, sizes):
    return grouped_dot(x, kernels, sizes), (x, kernels, sizes)


def _backward(kept, above):
    x, kernels, sizes = kept
    return *jax.vjp(lambda x, kernels: _ragged(x, kernels, sizes), x, kernels)[1](above), None


grouped_dot.defvjp(_forward, _backward)

grouped_dot_p = Primitive("grouped_dot")
grouped_dot_p.def_impl(jax.jit(grouped_dot_p.bind, static_argnames="precision"))
grouped_dot_p.def_abstract_eval(
    lambda x, kernels, _, **__: jax.core.ShapedArray((x.shape[0], kernels.shape[2]), x.dtype)
)


def _lower(ctx, *values, way, precision):
    with jax.default_matmul_precision(precision):  # as it was where the product was traced
        return mlir.lower_fun(way, multiple_results=False)(ctx, *values)


def _batch(values, axes, *, precision):
    """Under `jax.vmap`: `ragged_dot`, which any mapped axis may stand before."""
    with jax.default_matmul_precision(precision):
        return jax.vmap(_ragged, in_axes=axes)(*values), 0


batching.primitive_batchers[grouped_dot_p] = _batch
for _platform, _way in {"cpu": loop.dot, "cuda": _triton, "tpu": tpu.dot, None: _ragged}.items():
    mlir.register_lowering(grouped_dot_p, functools.partial(_lower, way=_way), platform=_platform)
