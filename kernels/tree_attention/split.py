"""Tree attention of a long prompt's block whose tokens, like the cache's slots, are split over a mesh.

Every device keeps its queries and does one n-th of the work: the block's keys and the parts of the cache go round a
ring of n devices (`specjax.kernels.ring_attention`). So a block with n times the tokens costs a device as much as one
block without a mesh. The cache travels once per block except for the first, so split blocks should be wide.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax.kernels.ring_attention import ring
from specjax.kernels.tree_attention import blocked
from specjax.kernels.tree_attention.mapped import numbered, specs
from specjax.kernels.tree_attention.parts import Operands, finished, nothing
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import RULES

AXES = Operands(
    queries=("batch", "kv_heads", "tokens", None),
    key=("batch", "kv_heads", "tokens", None),
    value=("batch", "kv_heads", "tokens", None),
    cache_key=("batch", "kv_heads", "slots", None),
    cache_value=("batch", "kv_heads", "slots", None),
    length=("batch",),
    query_positions=("batch", "tokens"),
    key_positions=("batch", "tokens"),
    unseen=("batch", "slots"),
    key_scale=("batch", "kv_heads", "slots"),
    value_scale=("batch", "kv_heads", "slots"),
    sinks=("kv_heads", "tokens"),
    cache_positions=("batch", "slots"),
)
"""Logical axes of the operands of `attend`."""
CACHE = ("cache_key", "cache_value", "unseen", "key_scale", "value_scale", "cache_positions")
"""The operands that travel together with their slots."""


def splits(query, key, cache_key) -> bool:
    """Whether the ambient mesh splits both `query` `[B, T, N, H]` of a block without a past and the slots of
    `cache_key`."""
    mesh, axis = known_mesh(), RULES["tokens"]
    if mesh is None or cache_key is None or mesh.shape.get(axis, 1) == 1:
        return False
    tokens, slots = query.shape[1], cache_key.shape[2]
    return key.shape[1] == tokens and tokens % mesh.shape[axis] == 0 and slots % mesh.shape[axis] == 0


def attend(operands: Operands, *, causal, scale, window, soft_cap) -> jax.Array:
    """Attention of a split block's queries, without `visible`; options are those of `tree_attention`."""
    mesh = known_mesh()
    assert mesh is not None, "there is no mesh to split over"
    group = operands.queries.shape[2] // operands.key.shape[2]
    places = specs(mesh, operands, AXES)
    local = functools.partial(
        _local, axis=RULES["tokens"], everyone=mesh.axis_names, group=group, causal=causal, scale=scale, window=window,
        soft_cap=soft_cap,
    )  # fmt: skip
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.shard_map(local, in_specs=(places,), out_specs=places.queries, check_vma=False)(operands)


def _local(operands: Operands, *, axis, everyone, group, causal, scale, window, soft_cap):
    if window is None:
        operands = dataclasses.replace(operands, query_positions=None, key_positions=None)
    queries, query_positions = operands.queries, operands.query_positions
    tokens, slots = operands.key.shape[2], operands.cache_key.shape[2]
    at = jax.lax.axis_index(axis) * tokens + jnp.arange(queries.shape[2] // group)

    def own(found, held, owner):
        key, value, positions = held

        def seen(index):
            visible = (owner * tokens + index[None, None] <= at[None, :, None]) | (not causal)
            if positions is None:
                return visible
            return visible & (query_positions[:, :, None] - positions[:, None, index] < window)

        values = key if value is None else value
        look = lambda found: ring.read(found, queries, key, values, seen, scale=scale, soft_cap=soft_cap)
        return jax.lax.cond(owner * tokens <= at[-1], look, lambda found: found, found) if causal else look(found)

    def prefix(found, held, owner):
        first = owner * slots  # slots are numbered within the part, and so are the values compared with them
        length = jnp.clip(operands.length - first, 0, slots)
        part = dataclasses.replace(operands, **dict(zip(CACHE, held, strict=True)), length=length)
        part = dataclasses.replace(part, query_positions=numbered(part, first))
        return blocked.prefix(found, part, scale=scale, window=window, soft_cap=soft_cap)

    held = operands.key, operands.value, operands.key_positions
    found = ring.around(axis, held, own, nothing(operands.result_shape))
    cache = tuple(getattr(operands, name) for name in CACHE)
    # a prompt's first block finds an empty cache; all devices must agree on that, also for rows on other devices
    used = jax.lax.pmax(jnp.max(operands.length), everyone) > 0
    found = jax.lax.cond(used, lambda found: ring.around(axis, cache, prefix, found), lambda found: found, found)
    return finished(found, operands.sinks)
