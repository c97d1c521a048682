"""JAX's own settings under which programs are traced here, whatever the caller's are: so one call gives one text.

What a caller may trace is `settled`: the methods of decoders and objectives, and the programs of this package. The operations
that become an implementation when they are lowered are lowered under `own`. In a caller's `jax.jit` nothing else changes.
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
"""What stands for types of 64 bits."""


@contextlib.contextmanager
def own() -> Iterator[None]:
    """Types of 32 bits, JAX's standard promotion, and threefry keys whose draws do not depend on how they are laid out."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
    ):
        yield


def settled(function: Callable[P, R]) -> Callable[P, R]:
    """The function under `own` settings. Arrays of 64 bits, which a caller has under `jax_enable_x64`, come in with 32."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = (args, kwargs)
        if jax.dtypes.canonicalize_dtype("int64") == "int64":  # under `jax_enable_x64`
            given = jax.tree.map(_narrowed, given)
        with own():
            return function(*given[0], **given[1])

    return called


def settle(cls: type, names: frozenset[str]) -> None:
    """Makes methods of these names, where a class has its own, `settled` ones."""
    for name in names & vars(cls).keys():
        setattr(cls, name, settled(vars(cls)[name]))


def _narrowed(leaf: Any) -> Any:
    narrow = NARROW.get(str(leaf.dtype)) if isinstance(leaf, jax.Array) else None
    return leaf if narrow is None else leaf.astype(narrow)
