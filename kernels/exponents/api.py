"""The entry point of numbers with coded exponents, which chooses an implementation when a program is lowered.

Nothing is traced for platforms for which the program is not compiled.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from specjax.kernels.exponents import xla
from specjax.kernels.gpu import has_triton
from specjax.kernels.products import split
from specjax.settings import own, settled

Array = jax.Array
Implementation = Literal["xla", "pallas_tpu_interpreted", "pallas_gpu_interpreted"]


def numbers(
    rest: Array, codes: Array, table: Array, after: Array | None = None, *, implementation: Implementation | None = None
) -> Array:
    """Restores a matrix in bfloat16, bit for bit, from its stored parts (DFloat11, Zhang et al. 2025,
    arXiv:2504.11651).

    A lane is a run of `n = E / S` inputs of one output. Its codes follow each other from the highest bit of its first
    word on. So all lanes are decoded in parallel and none waits for another. `W` are words of a lane.

    Args:
      rest: `[..., E, F]` uint8, the sign and the seven bits after the exponent.
      codes: `[..., W, S, F]` uint32.
      table: `[..., 256, 1, 1]` uint16; for the next eight bits of a lane, the exponent whose code they begin with and,
        in the high byte, the length of that code.
      after: if given, an array that must be computed first. Otherwise a CPU restores many matrices at once and keeps
        all of them; compilers of other platforms order this themselves.
      implementation: None decides when the program is lowered: a Pallas kernel on a TPU or an NVIDIA GPU if it supports
        the shapes and no mesh splits matrices, otherwise `xla`. Other values are for tests: the kernels in an
        interpreter.

    Returns:
      `[..., E, F]` bfloat16.

    Raises:
      ValueError: on an unknown implementation.
    """
    if implementation is None:
        if split():
            return xla.numbers(rest, codes, table)
        none = after is None or after.size == 0
        return exponents_p.bind(rest, codes, table, jnp.zeros(()) if none else jax.lax.stop_gradient(after))
    if implementation not in get_args(Implementation):
        raise ValueError(f"numbers has no implementation {implementation!r}; choose 'xla' or None")
    if implementation == "xla":
        return xla.numbers(rest, codes, table)
    return (_gpu if implementation == "pallas_gpu_interpreted" else _tpu)(rest, codes, table, interpret=True)


def _cpu(rest, codes, table, after):
    first = after[(0,) * after.ndim].astype(jnp.float32)
    # always 0, which the compiler does not know; it drops barriers before it schedules operations
    nothing = jnp.minimum(jax.lax.bitcast_convert_type(first, jnp.int32) & 1, 0).astype(table.dtype)
    return xla.numbers(rest, codes, table + nothing)


def _gpu(rest, codes, table, interpret=False):
    if not has_triton():
        return xla.numbers(rest, codes, table)
    from specjax.kernels.exponents import gpu  # Pallas takes long to import

    return _each(functools.partial(gpu.numbers, interpret=interpret), rest, codes, table)


def _tpu(rest, codes, table, interpret=False):
    from specjax.kernels.exponents import tpu

    if not tpu.serves(rest.shape, codes.shape):
        return xla.numbers(rest, codes, table)
    return _each(functools.partial(tpu.numbers, interpret=interpret), rest, codes, table)


def _each(kernel, rest, codes, table):
    """Decodes one matrix after the other."""
    if rest.ndim == 2:
        return kernel(rest, codes, table)
    return jax.lax.map(lambda parts: _each(kernel, *parts), (rest, codes, table))


exponents_p = Primitive("coded_exponents")
exponents_p.def_impl(jax.jit(exponents_p.bind))
exponents_p.def_abstract_eval(lambda rest, *_: jax.core.ShapedArray(rest.shape, jnp.bfloat16))


@settled
def _batch(values, axes):
    """Under `jax.vmap`: XLA's implementation, which supports any mapped axis; only once if no part of the matrix is
    mapped."""
    if all(axis is None for axis in axes[:3]):
        return exponents_p.bind(*values[:3], jax.lax.index_in_dim(values[3], 0, axes[3], keepdims=False)), None
    return jax.vmap(xla.numbers, in_axes=axes[:3])(*values[:3]), 0


def _lower(ctx, *values, way, count=3):
    with own():
        return mlir.lower_fun(way, multiple_results=False)(ctx.replace(avals_in=ctx.avals_in[:count]), *values[:count])


batching.primitive_batchers[exponents_p] = _batch
mlir.register_lowering(exponents_p, functools.partial(_lower, way=_cpu, count=4), platform="cpu")
for _platform, _way in {"cuda": _gpu, "tpu": _tpu, None: xla.numbers}.items():
    mlir.register_lowering(exponents_p, functools.partial(_lower, way=_way), platform=_platform)
