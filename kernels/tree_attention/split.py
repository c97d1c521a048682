"""Tree attention of a long prompt's block, whose tokens a mesh splits as it does the cache's slots.

Every device keeps its queries, and a part in n of the work: the block's keys and the parts of the cache go round a ring of n
devices (`specjax.kernels.ring_attention`). So a block of n times the tokens costs a device what one costs without a mesh; what
travels is the cache, once a block but the first, which is why blocks that are split should be wide.
"""

import functools

import jax
import jax.numpy as jnp

from specjax.kernels.ring_attention import ring
from specjax.kernels.tree_attention import blocked
from specjax.kernels.tree_attention.parts import finished, nothing
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import RULES, partition

AXES = (
    ("batch", "kv_heads", "tokens", None),  # queries
    ("batch", "kv_heads", "tokens", None),  # key
    ("batch", "kv_heads", "tokens", None),  # value
    ("batch", "kv_heads", "slots", None),  # cache_key
    ("batch", "kv_heads", "slots", None),  # cache_value
    ("batch",),  # length
    ("batch", "tokens"),  # query_positions
    ("batch", "tokens"),  # key_positions
    ("batch", "slots"),  # unseen
    ("batch", "kv_heads", "slots"),  # key_scale
    ("batch", "kv_heads", "slots"),  # value_scale
)
"""Logical axes of the operands of `attend`."""


def splits(query, key, cache_key) -> bool:
    """Whether the ambient mesh splits `query` `[B, T, N, H]` of a block without a past, and the slots of `cache_key`."""
    mesh, axis = known_mesh(), RULES["tokens"]
    if mesh is None or cache_key is None or mesh.shape.get(axis, 1) == 1:
        return False
    tokens, slots = query.shape[1], cache_key.shape[2]
    return key.shape[1] == tokens and tokens % mesh.shape[axis] == 0 and slots % mesh.shape[axis] == 0


def attend(*operands, causal, scale, window, soft_cap):
    """Attention of the queries `[B, K, T * G, H]` of a split block: operands as in `AXES`, the options of `tree_attention`."""
    mesh = known_mesh()
    assert mesh is not None, "there is no mesh to split over"
    group = operands[0].shape[2] // operands[1].shape[2]
    specs = tuple(
        None if x is None else partition(mesh, axes, x.shape, {}) for axes, x in zip(AXES, operands, strict=True)
    )
    local = functools.partial(
        _local, axis=RULES["tokens"], everyone=mesh.axis_names, group=group, causal=causal, scale=scale, window=window,
        soft_cap=soft_cap,
    )  # fmt: skip
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.shard_map(local, in_specs=specs, out_specs=specs[0], check_vma=False)(*operands)


def _local(
    queries, key, value, cache_key, cache_value, length, query_positions, key_positions, unseen, key_scale, value_scale,
    *, axis, everyone, group, causal, scale, window, soft_cap,
):  # fmt: skip
    tokens, slots = key.shape[2], cache_key.shape[2]
    at = jax.lax.axis_index(axis) * tokens + jnp.arange(queries.shape[2] // group)
    if window is None:
        query_positions = key_positions = None

    def own(found, held, owner):
        key, value, positions = held

        def seen(index):
            visible = (owner * tokens + index[None, None] <= at[None, :, None]) | (not causal)
            if positions is None:
                return visible
            return visible & (query_positions[:, :, None] - positions[:, None, index] < window)

        look = lambda found: ring.read(found, queries, key, value, seen, scale=scale, soft_cap=soft_cap)
        return jax.lax.cond(owner * tokens <= at[-1], look, lambda found: found, found) if causal else look(found)

    def prefix(found, held, owner):
        cache_key, cache_value, unseen, key_scale, value_scale = held
        first = owner * slots  # a slot is one of the part's own numbering, and so is what it is compared with
        return blocked.prefix(
            found, queries, cache_key, cache_value, jnp.clip(length - first, 0, slots),
            None if query_positions is None else query_positions - first, unseen, key_scale, value_scale,
            scale=scale, window=window, soft_cap=soft_cap, dtype=value.dtype,
        )  # fmt: skip

    found = ring.around(axis, (key, value, key_positions), own, nothing(queries.shape))
    cache = cache_key, cache_value, unseen, key_scale, value_scale
    # a prompt's first block finds an empty cache; all devices must agree on it, rows that others hold included
    used = jax.lax.pmax(jnp.max(length), everyone) > 0
    return finished(
        jax.lax.cond(used, lambda found: ring.around(axis, cache, prefix, found), lambda found: found, found)
    )
