"""The placement of a model's parameters on a mesh, with the copies of kv-heads that the mesh needs."""

import dataclasses
from typing import Any

import jax

from specjax.models.kv_heads import copied, copies_for, is_copied, merged
from specjax.models.llama import LlamaLM
from specjax.sharding import rules


def spread(lm: Any, params: Any, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Places a model's parameters on a mesh; models of the Llama family get the copies of kv-heads that the mesh
    needs."""
    wide = widened(lm, mesh)
    if wide == lm:
        return lm, jax.device_put(params, rules.shardings(mesh, lm.axes(params), params, lm.axis_counts()))
    stored = merged(params, lm.config, lm.kv_copies)
    return wide, with_copies(wide, jax.device_put(stored, stored_places(wide, mesh, stored)), mesh)


def widened(lm: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """The model with the copies of its kv-heads that a mesh needs."""
    return dataclasses.replace(lm, kv_copies=copies_for(lm.config, mesh)) if isinstance(lm, LlamaLM) else lm


def places_of(lm: Any, mesh: jax.sharding.Mesh, params: Any) -> Any:
    """Shardings of a model's parameters, or of their shapes."""
    return rules.shardings(mesh, lm.axes(params), params, lm.axis_counts())


def stored_places(lm: Any, mesh: jax.sharding.Mesh, stored: Any) -> Any:
    """Shardings of parameters without copies of kv-heads that give each device the same numbers as with copies.

    A device holds one copy of a kv-head. On a mesh whose model axis has one part per kv-head, it holds the same head,
    and the devices of a part differ only in the copy.

    Args:
      lm: what `widened` returned.
      mesh: that mesh.
      stored: the parameters without copies, or their shapes.
    """
    copies = getattr(lm, "kv_copies", 1)
    if copies == 1:
        return places_of(lm, mesh, stored)
    places = places_of(lm, mesh, _wide(lm, stored))
    axis = mesh.axis_names.index("model")
    sizes, names = list(mesh.devices.shape), list(mesh.axis_names)
    sizes[axis : axis + 1], names[axis : axis + 1] = [sizes[axis] // copies, copies], ["model", "copy"]
    types = (jax.sharding.AxisType.Auto,) * len(names)
    heads = places_of(
        dataclasses.replace(lm, kv_copies=1),
        jax.sharding.Mesh(mesh.devices.reshape(sizes), tuple(names), types),
        stored,
    )
    choose = lambda path, place, head: head if is_copied(path) else place
    return jax.tree_util.tree_map_with_path(choose, places, heads)


def with_copies(lm: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Parameters with copies of kv-heads, from parameters on `stored_places`. No data moves between devices.

    Args:
      lm: what `widened` returned.
      params: without copies.
      mesh: that mesh.
    """
    if getattr(lm, "kv_copies", 1) == 1:
        return params

    def named_anew(path, x, wide, place):
        own = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(wide.shape, place, own) if is_copied(path) else x

    wide = _wide(lm, params)
    return jax.tree_util.tree_map_with_path(named_anew, params, wide, places_of(lm, mesh, wide))


def _wide(lm: Any, stored: Any) -> Any:
    """The shapes of parameters with copies, from those without."""
    return jax.eval_shape(lambda params: copied(params, lm.config, lm.kv_copies), stored)


def share_of(mesh: jax.sharding.Mesh | None) -> tuple[int, int]:
    """The number of this process among those of a mesh, and how many there are."""
    processes = [] if mesh is None else sorted({device.process_index for device in mesh.devices.flat})
    own = jax.process_index() if processes else 0
    return (processes.index(own), len(processes)) if own in processes else (0, 1)
