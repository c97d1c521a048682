"""Meshes: one table from logical axes to mesh axes, used by parameters, caches and state alike."""

from specjax.sharding.mesh import make_mesh
from specjax.sharding.rules import RULES, shardings

__all__ = ["RULES", "make_mesh", "shardings"]
