"""Ring attention as one function of whole arrays."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from specjax.kernels.ring_attention import ring
from specjax.kernels.tree_attention.parts import finished, grouped, nothing, ungrouped
from specjax.sharding.rules import RULES, partition


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    mesh: jax.sharding.Mesh | None = None,
    block_size: int = 512,
) -> jax.Array:
    """Exact softmax attention over sequences split over the mesh axis `context` (Liu et al. 2023, arXiv:2310.01889).

    Every device keeps its queries. Keys and values go round the axis, and each device adds them to a running softmax in
    float32. So each of n devices holds one n-th of everything, and no array of all scores. Rows are split over `data`
    and heads over `model` if these divide them.

    The function can be differentiated. Scores are then recomputed, and a device keeps all keys and values that passed.

    Parts are contiguous, so under `is_causal` the last device works longest. A device skips a part of the keys that is
    entirely ahead of its queries, and the ring waits for the other devices. (A zigzag order would balance that.)

    In the shape descriptions `T` denotes queries, `S` keys, `K` kv-heads, `G` query heads per kv-head.

    Args:
      query: `[B, T, K * G, H]`. T and S need not be multiples of the axis's size; they are padded.
      key: `[B, S, K, H]`.
      value: as `key`.
      is_causal: whether the query at i sees only the keys up to i; otherwise all keys.
      scale: the factor of the scores; None: `1 / sqrt(H)`.
      mesh: a mesh with this axis, of type `Auto` as from `specjax.sharding.make_mesh`; None: the ambient mesh
        (`jax.set_mesh`). Without a mesh or without the axis, one device does everything.
      block_size: keys that a device scores at a time.

    Returns:
      `[B, T, K * G, H]` in the query's type.

    Raises:
      ValueError: on incompatible shapes; on a mesh with `Explicit` axes (as from `jax.make_mesh`); and inside a
        `shard_map` over the axis, where arrays are not whole.
    """
    if query.ndim != 4 or key.shape != value.shape or query.shape[::3] != key.shape[::3] or not query.size * key.size:
        raise ValueError(
            f"ring_attention needs a query [B, T, N, H] and keys and values [B, S, K, H], none empty, not {query.shape}, "
            f"{key.shape} and {value.shape}"
        )
    if query.shape[2] % key.shape[2] or block_size < 1:
        raise ValueError(
            f"ring_attention needs query heads that kv-heads divide and a block_size of at least 1, not {query.shape[2]}, "
            f"{key.shape[2]} and {block_size}"
        )
    scale = query.shape[3] ** -0.5 if scale is None else scale
    over = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if RULES["tokens"] in over.manual_axes:
        raise ValueError(f"ring_attention takes whole arrays: call it outside shard_map over {RULES['tokens']!r}")
    if AxisType.Explicit in over.axis_types:
        raise ValueError(
            f"ring_attention needs a mesh whose axes are Auto, not {over.axis_types}: make it with specjax.sharding.make_mesh"
        )
    return _ring(query, key, value, is_causal, scale, over, block_size)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _ring(query, key, value, is_causal, scale, mesh, block_size):
    axis = RULES["tokens"]
    count = 1 if mesh.empty else mesh.shape.get(axis, 1)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % count), (0, 0), (0, 0)))
    operands = grouped(pad(query), key.shape[2]), pad(key).swapaxes(1, 2), pad(value).swapaxes(1, 2)
    local = functools.partial(
        _local, axis=axis if count > 1 else None, group=query.shape[2] // key.shape[2], keys=key.shape[1],
        is_causal=is_causal, scale=scale, block=block_size,
    )  # fmt: skip
    if count > 1:
        spec = partition(mesh, ("batch", "kv_heads", "tokens", None), operands[1].shape, {})
        local = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return ungrouped(local(*operands), pad(query))[:, : query.shape[1]]


def _local(queries, key, value, *, axis, group, keys, is_causal, scale, block):
    """Attention of a device's queries `[B, K, T * G, H]` and keys `[B, K, S, H]`. Of all keys, the first `keys` are
    real."""
    rows, size = queries.shape[2] // group, key.shape[2]
    at = jnp.arange(rows) + (0 if axis is None else jax.lax.axis_index(axis) * rows)

    def visit(found, held, owner):
        first = owner * size
        key, value = held

        def seen(index):
            real = (first + index < keys)[None, None]
            return real & (first + index[None, None] <= at[None, :, None]) if is_causal else real

        # the gradient recomputes a part's scores; otherwise it would keep all weights
        look = jax.checkpoint(lambda found: ring.read(found, queries, key, value, seen, scale=scale, block=block))
        return jax.lax.cond(first <= at[-1], look, lambda found: found, found) if is_causal else look(found)

    found = nothing(queries.shape)
    return finished(visit(found, (key, value), 0) if axis is None else ring.around(axis, (key, value), visit, found))
