"""Ring attention as one function of whole arrays."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from specjax.kernels.ring_attention import queries, ring
from specjax.kernels.ring_attention.traffic import fewest, has_switch
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
    moves: str = "keys",
) -> jax.Array:
    """Exact softmax attention over sequences split over the mesh axis `context`.

    With `moves="keys"` every device keeps its queries (Liu et al. 2023, arXiv:2310.01889). Keys and values go round the
    axis, and each device adds them to a running softmax in float32. So each of n devices holds one n-th of everything, and
    no array of all scores. Rows are split over `data` and heads over `model` if these divide them.

    With `moves="queries"` every device keeps its keys (TokenRing, arXiv:2412.20501; see `queries`). Queries go one way, and
    results with their log-sum-exps go straight back. `traffic` counts the bytes of both; `moves="fewest"` has the
    one with fewer for this call.

    The function can be differentiated. Scores are then recomputed, and a device keeps all keys and values that passed.

    Parts are contiguous, so with `moves="keys"` and `is_causal` the last device works longest. A device skips a part of the
    keys that is entirely ahead of its queries, and the ring waits for the other devices. With `moves="queries"` chunks
    are exchanged before and after, so that all devices do equal work.

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
      moves: see above.

    Returns:
      `[B, T, K * G, H]` in the query's type.

    Raises:
      ValueError: on incompatible shapes, among them a causal sequence of more keys than queries, or fewer, whose queries
        move; on a mesh with `Explicit` axes (as from `jax.make_mesh`); and inside a `shard_map` over the axis, where arrays
        are not whole.
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
    if moves not in ("keys", "queries", "fewest"):
        raise ValueError(f"ring_attention moves 'keys', 'queries' or the 'fewest' bytes, not {moves!r}")
    if moves == "queries" and is_causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"queries move only with as many keys in a causal sequence, not {query.shape[1]} and {key.shape[1]}: move keys"
        )
    scale = query.shape[3] ** -0.5 if scale is None else scale
    over = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if RULES["tokens"] in over.manual_axes:
        raise ValueError(f"ring_attention takes whole arrays: call it outside shard_map over {RULES['tokens']!r}")
    if AxisType.Explicit in over.axis_types:
        raise ValueError(
            f"ring_attention needs a mesh whose axes are Auto, not {over.axis_types}: make it with specjax.sharding.make_mesh"
        )
    if moves == "fewest":
        devices = 1 if over.empty else over.shape.get(RULES["tokens"], 1)
        moves = fewest(query, key, is_causal, devices, has_switch(over))
    return _ring(query, key, value, is_causal, scale, over, block_size, moves)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _ring(query, key, value, is_causal, scale, mesh, block_size, moves):
    axis = RULES["tokens"]
    count = 1 if mesh.empty else mesh.shape.get(axis, 1)
    parts = 2 * count if moves == "queries" else count  # a device has two chunks of a causal sequence
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % parts), (0, 0), (0, 0)))
    operands = grouped(pad(query), key.shape[2]), pad(key).swapaxes(1, 2), pad(value).swapaxes(1, 2)
    local = functools.partial(
        _queries if moves == "queries" and count > 1 else _local, axis=axis if count > 1 else None,
        group=query.shape[2] // key.shape[2], keys=key.shape[1],
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


def _queries(given, key, value, *, axis, group, keys, is_causal, scale, block):
    """Like `_local`, but keys stay."""

    @functools.partial(jax.checkpoint, static_argnums=(4,))
    def read(found, some, key, value, seen):
        return ring.read(found, some, key, value, seen, scale=scale, block=block)

    if is_causal:
        return finished(queries.causal(axis, given, key, value, read))
    first = jax.lax.axis_index(axis) * key.shape[2]
    return finished(queries.full(axis, given, key, value, read, lambda index: (first + index < keys)[None, None]))
