"""The mesh that code is traced under: what a kernel asks to know its part (`jax.sharding.get_abstract_mesh`)."""

import contextlib
import functools

import jax


def on_mesh(method):
    """A method that is traced under its object's `mesh`; as it is where that is None."""

    @functools.wraps(method)
    def traced(self, *args, **kwargs):
        known = self.mesh is not None
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh) if known else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    return traced
