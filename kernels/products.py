"""Products as one operation each, which becomes an implementation when a program is lowered and the platform is known.

Nothing is traced for platforms that a program is not compiled for.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from specjax.kernels.precision import setting
from specjax.settings import own

Array = jax.Array


def split() -> bool:
    """Whether a mesh splits arrays: nobody partitions a kernel, and a loop would exchange its sums in each round."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size > 1 and not mesh.manual_axes


def by_platform(
    name: str, result: Callable[..., Any], ways: Mapping[str, Callable[..., Array]], plain: Callable[..., Array]
) -> Callable[..., Array]:
    """A product that every platform has its own way of.

    Args:
      name: of the operation.
      result: makes of the operands' shapes and types the product's, a `jax.core.ShapedArray`.
      ways: the function of the operands for some platforms (`cpu`, `cuda`, `tpu`).
      plain: that for the others, and under `jax.vmap`: one that any mapped axis may stand before.

    Returns:
      A function of the operands. Its precision is what `jax.default_matmul_precision` says where it is traced.
    """
    product = Primitive(name)
    product.def_impl(jax.jit(product.bind, static_argnames="precision"))
    product.def_abstract_eval(lambda *given, precision: result(*given))

    def lower(ctx, *values, way, precision):
        with own(), jax.default_matmul_precision(precision):
            return mlir.lower_fun(way, multiple_results=False)(ctx, *values)

    def batch(values, axes, *, precision):
        with own(), jax.default_matmul_precision(precision):
            return jax.vmap(plain, in_axes=axes)(*values), 0

    batching.primitive_batchers[product] = batch
    for platform, way in {**ways, None: plain}.items():
        mlir.register_lowering(product, functools.partial(lower, way=way), platform=platform)
    return lambda *given: product.bind(*given, precision=setting())
