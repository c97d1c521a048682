"""The entry point of grouped products, which chooses an implementation when a program is lowered.

Nothing is traced for platforms for which the program is not compiled.
"""

import jax

from specjax.kernels.gpu import has_triton
from specjax.kernels.grouped_dot import loop, tpu
from specjax.kernels.products import by_platform, split

Array = jax.Array


@jax.custom_vjp
def grouped_dot(x: Array, kernels: Array, sizes: Array) -> Array:
    """`jax.lax.ragged_dot` that reads only the matrices of groups with rows; on CPUs and GPUs, JAX's version reads all
    of them.

    Derivatives are those of `ragged_dot`. In the shape descriptions `R` denotes rows, `X` groups, `E` inputs, `F` outputs.

    Args:
      x: `[R, E]`, sorted by group.
      kernels: `[X, E, F]`.
      sizes: how many rows each group has, `[X]` int32, at most R in all.

    Returns:
      `[R, F]` in the type of `x`; what lies after the rows of all groups is undefined.
    """
    if split():
        return _ragged(x, kernels, sizes)
    return _dot(x, kernels, sizes)


def _ragged(x, kernels, sizes):
    return jax.lax.ragged_dot(x, kernels, sizes).astype(x.dtype)


def _cuda(x, kernels, sizes):
    if not has_triton():
        return _ragged(x, kernels, sizes)
    from specjax.kernels.grouped_dot import gpu  # Pallas takes long to import

    return gpu.dot(x, kernels, sizes)


def _forward(x, kernels, sizes):
    return grouped_dot(x, kernels, sizes), (x, kernels, sizes)


def _backward(kept, above):
    x, kernels, sizes = kept
    return *jax.vjp(lambda x, kernels: _ragged(x, kernels, sizes), x, kernels)[1](above), None


grouped_dot.defvjp(_forward, _backward)

_dot = by_platform(
    "grouped_dot",
    lambda x, kernels, _: jax.core.ShapedArray((x.shape[0], kernels.shape[2]), x.dtype),
    {"cpu": loop.dot, "cuda": _cuda, "tpu": tpu.dot},
    _ragged,
)
