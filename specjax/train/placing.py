"""The placement of trained parameters on a mesh.

Between uses, every device holds only its part of a parameter, its moments and its gradient. They are split as in
decoding, and also over the axis of rows, along which they would otherwise be copied (FSDP, arXiv:2304.11277). For a
pass, they are gathered over rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models.param_axes import param_axes
from specjax.objectives.base import Objective
from specjax.sharding.rules import fully_sharded

PyTree = Any


def rounded(params: PyTree, dtype: str) -> PyTree:
    """Parameters in the type in which a pass multiplies them.

    Kernels over a vocabulary are unchanged. Distributions are made in chunks (`specjax.objectives.teacher`), and each
    chunk rounds the kernels itself, so that their gradients from all chunks add up in float32."""

    if dtype == "float32":
        return params

    def cast(x, axes):
        return x if axes[-1:] == ("vocab",) or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)

    return jax.tree.map(cast, params, param_axes(params))


def gathered(objective: Objective, mesh: Mesh | None, params: PyTree) -> PyTree:
    """Parameters as a pass reads them; inside jit. Unchanged without a mesh."""
    return params if mesh is None else jax.lax.with_sharding_constraint(params, objective.param_shardings(mesh, params))


def spread(objective: Objective, mesh: Mesh | None, params: PyTree) -> PyTree:
    """Parameters or gradients, split as between passes; inside jit. Unchanged without a mesh."""
    return params if mesh is None else jax.lax.with_sharding_constraint(params, param_places(objective, mesh, params))


def param_places(objective: Objective, mesh: Mesh, params: PyTree) -> PyTree:
    """A sharding for every parameter."""
    return fully_sharded(objective.param_shardings(mesh, params), params)


def optimizer_places(
    objective: Objective, optimizer: optax.GradientTransformation, mesh: Mesh, params: PyTree, state: PyTree
) -> PyTree:
    """A sharding for every leaf of an optimizer's state: moments are split like their parameter, other leaves are
    copied."""
    return optax.tree_map_params(
        optimizer.init,
        lambda _, place: place,
        state,
        param_places(objective, mesh, params),
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )
