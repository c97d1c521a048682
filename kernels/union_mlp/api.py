"""The entry point of MLPs over a union of experts, which chooses an implementation when a program is lowered."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from specjax.kernels.gpu import has_triton
from specjax.kernels.products import by_platform, split
from specjax.kernels.union_mlp import dense, loop, xla

Array = jax.Array
Implementation = Literal["dense", "xla", "loop", "pallas_tpu_interpreted", "pallas_gpu_interpreted"]

MOST_ROWS = 64
"""The most rows of a step. A prompt's rows need nearly all experts together."""


def union_size(weights: Array) -> Array:
    """How many experts have a weight in some row, an int32, of `[N, X]`."""
    return jnp.any(weights != 0, axis=0).sum(dtype=jnp.int32)


def union_mlp(
    x: Array,
    weights: Array,
    up: Array,
    down: Array,
    *,
    capacity: int | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """`(silu(x @ up) * repeat(weights, F)) @ down`, in which an expert is F neighbouring columns of `up` and rows of `down`.

    Only the experts in the union of the rows' experts are read, if they are no more than `capacity`; otherwise all are
    (BlockFFN, Song et al. 2025, arXiv:2507.08771, section 3.4). The result is that of all experts either way, since an
    expert without a weight adds nothing. Derivatives are those of the formula.

    In the shape descriptions `N` denotes rows, `E` the width, `X` experts, `F` an expert's width, `C` the capacity.

    Args:
      x: `[N, E]`.
      weights: `[N, X]`; most are 0.
      up: `[E, X F]`.
      down: `[X F, E]`.
      capacity: C, static; None: half of the experts.
      implementation: None decides when the program is lowered. It is `dense` for more than `MOST_ROWS` rows and on a mesh
        that splits matrices, otherwise a loop on a CPU, a Pallas kernel on a TPU or an NVIDIA GPU if it supports the
        shapes, and `xla` elsewhere. Other values are for tests and measurements.

    Returns:
      `[N, E]` in the type of `x`.

    Raises:
      ValueError: on an unknown implementation, and on a capacity that is not 1 to X.
    """
    experts = weights.shape[1]
    capacity = max(experts // 2, 1) if capacity is None else capacity
    if not 1 <= capacity <= experts:
        raise ValueError(f"union_mlp: capacity must be 1 to {experts}, the number of experts, got {capacity}")
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"union_mlp has no implementation {implementation!r}; choose 'dense', 'xla', 'loop' or None")
    if implementation is None and (x.shape[0] > MOST_ROWS or split()):
        implementation = "dense"
    return _either(x, weights, up, down, capacity, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _either(x, weights, up, down, capacity, implementation):
    if implementation == "dense":
        return dense.mlp(x, weights, up, down)
    used = jnp.any(weights != 0, axis=0)
    # the union first, each part in ascending order
    index = jnp.argsort(~used, stable=True)[:capacity].astype(jnp.int32)
    count = used.sum(dtype=jnp.int32)
    way = _ways.get(implementation, _union)

    def few(x, weights, up, down, index, count):
        return way(x, weights, up, down, index, count)

    def all_of_them(x, weights, up, down, index, count):
        return dense.mlp(x, weights, up, down)

    return jax.lax.cond(count <= capacity, few, all_of_them, x, weights, up, down, index, count)


def _forward(x, weights, up, down, capacity, implementation):
    return _either(x, weights, up, down, capacity, implementation), (x, weights, up, down)


def _backward(capacity, implementation, kept, above):
    return jax.vjp(dense.mlp, *kept)[1](above)


_either.defvjp(_forward, _backward)


def _cuda(x, weights, up, down, index, count, interpret=False):
    if not has_triton():
        return xla.mlp(x, weights, up, down, index, count)
    from specjax.kernels.union_mlp import gpu  # Pallas takes long to import

    if not gpu.takes(up, weights):
        return xla.mlp(x, weights, up, down, index, count)
    return gpu.mlp(x, weights, up, down, index, count, interpret=interpret)


def _tpu(x, weights, up, down, index, count, interpret=False):
    from specjax.kernels.union_mlp import tpu

    if not tpu.takes(x, weights, up):
        return xla.mlp(x, weights, up, down, index, count)
    return tpu.mlp(x, weights, up, down, index, count, interpret=interpret)


_union = by_platform(
    "union_mlp",
    lambda x, *_: jax.core.ShapedArray(x.shape, x.dtype),
    {"cpu": loop.mlp, "cuda": _cuda, "tpu": _tpu},
    xla.mlp,
)
_ways = {
    "xla": xla.mlp,
    "loop": loop.mlp,
    "pallas_tpu_interpreted": functools.partial(_tpu, interpret=True),
    "pallas_gpu_interpreted": functools.partial(_cuda, interpret=True),
}
