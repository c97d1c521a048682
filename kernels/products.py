"""Products as single operations, whose implementation is chosen when a program is lowered and the platform is known.

Nothing is traced for platforms for which a program is not compiled.
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
    """Whether a mesh splits arrays. If so, kernels cannot be used, since nothing partitions them, and a loop would
    exchange its sums in each round."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size > 1 and not mesh.manual_axes


def by_platform(
    name: str, result: Callable[..., Any], ways: Mapping[str, Callable[..., Array]], plain: Callable[..., Array]
) -> Callable[..., Array]:
    """A product with an implementation for each platform.

    Args:
      name: the operation's name.
      result: makes the product's shape and type, a `jax.core.ShapedArray`, from those of the operands.
      ways: the functions for some platforms (`cpu`, `cuda`, `tpu`).
      plain: the function for other platforms and under `jax.vmap`; it must support any mapped axis.

    Returns:
      A function of the operands. Its precision is `jax.default_matmul_precision` at the time of tracing.
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
