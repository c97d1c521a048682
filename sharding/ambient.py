"""The mesh under which code is traced, from which a kernel learns its part (`jax.sharding.get_abstract_mesh`)."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType

from specjax.sharding.rules import partition, parts

Method = TypeVar("Method", bound=Callable)


def on_mesh(method: Method) -> Method:
    """A decorator: the method is traced under its object's `mesh`; unchanged if that is None."""

    @functools.wraps(method)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with under(self.mesh):
            return method(self, *args, **kwargs)

    return traced  # type: ignore[return-value]


def under(mesh: jax.sharding.Mesh | None) -> contextlib.AbstractContextManager:
    """Inside jit: a context whose code is traced for this mesh; without a mesh nothing changes."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def known_mesh() -> jax.sharding.AbstractMesh | None:
    """The ambient mesh if it splits the traced arrays; None if it `says_nothing`."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if says_nothing(mesh) else mesh


def says_nothing(mesh: jax.sharding.AbstractMesh) -> bool:
    """Whether an ambient mesh does not tell how arrays are split.

    That is so if there is no mesh or only one device, inside `shard_map` (the caller knows), and under `Explicit` axes
    (the arrays' types tell)."""
    return mesh.empty or mesh.size == 1 or bool(mesh.manual_axes) or AxisType.Explicit in mesh.axis_types


def split_tokens(x: jax.Array) -> jax.Array:
    """`[B, T, ...]` with its tokens kept split by the ambient mesh; unchanged if nothing splits them."""
    mesh = known_mesh()
    if mesh is None or parts(mesh, "tokens") == 1:
        return x
    spec = partition(mesh, ("batch", "tokens") + (None,) * (x.ndim - 2), x.shape, {})
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))
