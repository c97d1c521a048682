"""A product of a few rows with a large matrix, which reads the matrix once.

XLA's CPU backend lays a matrix out anew before it multiplies two or more rows with it, so that several nodes of a draft take
twice as long as one. On a CPU with Numba (the extra `cpu`), these products are a kernel's; elsewhere they are XLA's.
"""

import functools
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.products import by_platform, split

Array = jax.Array

MOST_ROWS = 12
"""XLA is as fast with more."""
FEWEST_NUMBERS = 2**16
"""Smaller matrices stay in a core's cache."""
_VERSIONS = ((0, 1), (0, 2), (0, 3))
"""Those of XLA's foreign function interface whose structures `native` reads."""


def takes(x: Array, matrix: Any) -> bool:
    """Whether `few_rows` serves a product: of at most 12 rows `[..., E]` with a matrix of at least 2^16 numbers, all in
    float32, which no mesh splits."""
    rows = math.prod(x.shape[:-1])
    return (
        0 < rows <= MOST_ROWS
        and x.dtype == matrix.dtype == jnp.float32
        and matrix.size >= FEWEST_NUMBERS
        and _has_numba()
        and not split()
    )


@functools.cache
def _has_numba() -> bool:
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    if importlib.util.find_spec("numba") is None or not header.exists():
        return False
    text = header.read_text()
    numbers = (re.search(rf"XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    return tuple(int(found[1]) for found in numbers if found) in _VERSIONS


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def few_rows(x: Array, matrix: Array, by_outputs: bool = False) -> Array:
    """`x @ matrix`, or `x @ matrix.T`, for operands that `takes` takes.

    A row's result does not depend on the other rows, nor on their number.

    Args:
      x: `[..., E]`.
      matrix: `[E, F]`, or `[F, E]` by outputs, as a tied embedding is.
      by_outputs: whether a row of the matrix has all inputs of an output.

    Returns:
      `[..., F]`.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = _by_outputs(rows, matrix) if by_outputs else _by_inputs(rows, matrix)
    return product.reshape(*x.shape[:-1], product.shape[-1])


def _forward(x, matrix, by_outputs):
    return few_rows(x, matrix, by_outputs), (x, matrix)


def _backward(by_outputs, kept, above):
    plain = _plain(by_outputs)
    return jax.vjp(lambda x, matrix: plain(x, matrix), *kept)[1](above)


few_rows.defvjp(_forward, _backward)


def _plain(by_outputs):
    return lambda x, matrix: jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (int(by_outputs),)), ((), ())))


def _native(by_outputs, x, matrix):
    from specjax.kernels.few_rows import native  # Numba takes long to import

    return native.dot(x, matrix, by_outputs)


def _operation(name, by_outputs):
    shape = lambda x, matrix: jax.core.ShapedArray((x.shape[0], matrix.shape[0 if by_outputs else 1]), jnp.float32)
    return by_platform(name, shape, {"cpu": functools.partial(_native, by_outputs)}, _plain(by_outputs))


_by_inputs = _operation("few_rows", False)
_by_outputs = _operation("few_rows_by_outputs", True)
