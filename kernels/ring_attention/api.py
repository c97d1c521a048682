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
    """Softmax attention, exact, of sequences that a mesh splits over its axis `context` (Liu et al. 2023, arXiv:2310.01889).

    Every device keeps its queries. Keys and values go round the axis, and are added to a running softmax in float32 wherever
    they come: n devices hold a part in n of everything, and no array of all scores. Rows are split over `data` and heads over
    `model` where those divide. It can be differentiated: scores are then computed anew, and a device keeps all the keys and
    values that came by.

    Parts are contiguous, so under `is_causal` the last device works longest: a part of the keys is skipped where all of
    it lies ahead, and the ring waits for the devices that it lies after. (A zigzag order would balance that.)

    In the shape descriptions `T` denotes queries, `S` keys, `K` kv-heads, `G` query heads per kv-head.

    Args:
      query: `[B, T, K * G, H]`. Neither T nor S has to divide over the axis; what is missing is padded.
      key: `[B, S, K, H]`.
      value: as `key`.
      is_causal: whether the query at i sees the keys up to i only; else all.
      scale: multiplies the scores; None is `1 / sqrt(H)`.
      mesh: with the axis, of type `Auto` as `specjax.sharding.make_mesh` makes it; None is the ambient one (`jax.set_mesh`).
        Without either, or without the axis, one device does all.
      block_size: keys that a device scores at a time.

    Returns:
      `[B, T, K * G, H]` in the query's type.

    Raises:
      ValueError: on shapes that do not go together; on a mesh of `Explicit` axes (`jax.make_mesh` makes those); and inside a
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
    """Queries `[B, K, T * G, H]` and keys `[B, K, S, H]` of a device. `keys` of all there are, the rest is padding."""
    rows, size = queries.shape[2] // group, key.shape[2]
    at = jnp.arange(rows) + (0 if axis is None else jax.lax.axis_index(axis) * rows)

    def visit(found, held, owner):
        first = owner * size
        key, value = held

        def seen(index):
            real = (first + index < keys)[None, None]
            return real & (first + index[None, None] <= at[None, :, None]) if is_causal else real

        # its gradient scores a part anew: else it would keep all weights
        look = jax.checkpoint(lambda found: ring.read(found, queries, key, value, seen, scale=scale, block=block))
        return jax.lax.cond(first <= at[-1], look, lambda found: found, found) if is_causal else look(found)

    found = nothing(queries.shape)
    return finished(visit(found, (key, value), 0) if axis is None else ring.around(axis, (key, value), visit, found))
