"""Meshes, and one table from logical axes to mesh axes for parameters, caches and state."""

from specjax.sharding.mesh import make_mesh
from specjax.sharding.rules import RULES, shardings

__all__ = ["RULES", "make_mesh", "shardings"]
