"""JAX's own settings for tracing programs here, whatever the caller's settings are, so that one call gives one text.

`settled` wraps everything that a caller may trace: the methods of decoders and objectives, and this package's programs.
Operations that choose their implementation at lowering are lowered under `own`. Nothing else in a caller's `jax.jit`
changes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

P = ParamSpec("P")
R = TypeVar("R")

NARROW = {"int64": jnp.int32, "uint64": jnp.uint32, "float64": jnp.float32, "complex128": jnp.complex64}
"""The replacements for 64-bit types."""


@contextlib.contextmanager
def own() -> Iterator[None]:
    """32-bit types, JAX's standard promotion, and threefry keys whose draws do not depend on their layout."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
    ):
        yield


def settled(function: Callable[P, R]) -> Callable[P, R]:
    """The function under `own` settings. Its 64-bit arguments, possible under `jax_enable_x64`, are converted to 32 bits."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = (args, kwargs)
        if jax.dtypes.canonicalize_dtype("int64") == "int64":  # under `jax_enable_x64`
            given = jax.tree.map(_narrowed, given)
        with own():
            return function(*given[0], **given[1])

    return called


def settle(cls: type, names: frozenset[str]) -> None:
    """Wraps methods with these names in `settled`, if the class defines them itself."""
    for name in names & vars(cls).keys():
        setattr(cls, name, settled(vars(cls)[name]))


def _narrowed(leaf: Any) -> Any:
    narrow = NARROW.get(str(leaf.dtype)) if isinstance(leaf, jax.Array) else None
    return leaf if narrow is None else leaf.astype(narrow)
