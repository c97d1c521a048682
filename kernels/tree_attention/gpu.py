"""Tree attention on an NVIDIA GPU: Triton programs that share out a row's prefix, and a merge of what they found.

With few queries there are too few rows and kv-heads to fill a GPU, so the used part of every row's cache is split as well
(Flash-Decoding, Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A part leaves its peak, its total
and its weighted sum; these and the block's own, which XLA computes, meet by their log-sum-exps.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.tree_attention.parts import (
    MASKED,
    Found,
    Operands,
    capped,
    finished,
    mix,
    nothing,
    product,
    running,
    scores,
)

BLOCK = 16, 64
"""The fewest and the most cache slots a program reads at a time: 64 unless heads are so wide that these fill its memory."""
PROGRAMS = 264
"""How many programs are wanted: two for each of an H100's multiprocessors."""
SPLIT = 256
"""The fewest slots of the capacity a part is worth: what it leaves behind must be small beside what it reads."""
TILE = (16, 64)
"""The fewest and the most queries of a program; tensor cores take no fewer than 16."""
MEMORY = 2**15
"""Bytes that the queries of a program may take, and the keys that it reads at a time: an H100 has room for seven of these."""


def refusal(operands: Operands) -> str | None:
    """Why the kernel cannot take such operands, or None."""
    width = operands.queries.shape[3]
    if width < 16 or width & (width - 1):
        return f"on a GPU the head width has to be a power of two of at least 16, not {width}"
    return None


def attend(operands: Operands, **options) -> jax.Array:
    """See `api.attend_with`. `interpret` runs it on any platform, slowly."""
    return finished(find(operands, **options), operands.sinks)


def find(operands: Operands, *, scale, window, soft_cap, interpret=False) -> Found:
    """The same as `Found`."""
    queries, query_positions = operands.queries, operands.query_positions
    batch, heads, rows, width = queries.shape
    capacity = operands.cache_key.shape[2]
    most = MEMORY // (width * jnp.promote_types(queries.dtype, operands.value.dtype).itemsize)
    block, largest = (min(max(most, fewest), usual) for fewest, usual in (BLOCK, TILE))
    tile = min(max(pl.next_power_of_2(rows), TILE[0]), largest)
    tiles = pl.cdiv(rows, tile)
    splits = max(1, min(pl.cdiv(capacity, SPLIT), PROGRAMS // (batch * heads * tiles)))

    used = jnp.minimum(operands.length, capacity)
    first = jnp.zeros_like(used)
    if window is not None and operands.cache_positions is None:
        first = jnp.maximum(jnp.min(query_positions, axis=1) - window + 1, 0) // block * block
    blocks = pl.cdiv(jnp.maximum(used - first, 0), block)
    ranges = jnp.stack(
        [first, pl.cdiv(blocks, splits) * block, used], axis=1
    )  # where it starts, slots a part, where it ends

    whole = lambda x: pl.BlockSpec((None, None, *x.shape[2:]), lambda b, k, p: (b, k) + (0,) * (x.ndim - 2))
    tiled = lambda columns: pl.BlockSpec((None, None, tile, columns), lambda b, k, p: (b, k, p % tiles, 0))
    part = lambda columns: pl.BlockSpec(
        (None, None, None, tile, columns), lambda b, k, p: (b, k, p // tiles, p % tiles, 0)
    )
    pad = tiles * tile - rows
    inputs = {
        "ranges": (ranges, pl.BlockSpec((None, 3), lambda b, k, p: (b, 0))),
        "query": (jnp.pad(queries, ((0, 0), (0, 0), (0, pad), (0, 0))), tiled(width)),
        "cache_key": (operands.cache_key, whole(operands.cache_key)),
        "cache_value": (operands.cache_value, whole(operands.cache_value)),
    }
    if window is not None:
        positions = jnp.pad(jnp.repeat(query_positions, rows // query_positions.shape[1], axis=1), ((0, 0), (0, pad)))
        inputs["positions"] = positions[:, :, None], pl.BlockSpec((None, tile, 1), lambda b, k, p: (b, p % tiles, 0))
    if operands.unseen is not None:
        inputs["unseen"] = operands.unseen.astype(jnp.int8), pl.BlockSpec((None, capacity), lambda b, k, p: (b, 0))
    if operands.cache_positions is not None:
        inputs["cache_positions"] = operands.cache_positions, pl.BlockSpec((None, capacity), lambda b, k, p: (b, 0))
    if operands.key_scale is not None:
        inputs["key_scale"] = operands.key_scale, whole(operands.key_scale)
        inputs["value_scale"] = operands.value_scale, whole(operands.value_scale)
    found = jax.ShapeDtypeStruct((batch, heads, splits, tiles * tile, 1), jnp.float32)
    sums = jax.ShapeDtypeStruct((batch, heads, splits, tiles * tile, width), jnp.float32)
    kernel = functools.partial(
        _kernel,
        names=tuple(inputs),
        tiles=tiles,
        block=block,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        plain=operands.value.dtype,
    )
    *parts, mixed = pl.pallas_call(
        kernel,
        out_shape=(found, found, sums),
        grid=(batch, heads, splits * tiles),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=(part(1), part(1), part(width)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="tree_attention",
    )(*(x for x, _ in inputs.values()))

    before = nothing(queries.shape)[:2]
    own, weights, _ = running(before, scores(queries, operands.key, operands.visible, scale, soft_cap))
    peak, total, mixed = (
        jnp.concatenate([x[:, :, None], y[:, :, :, :rows]], axis=2)
        for x, y in zip((*own, mix(weights, operands.value)), (*parts, mixed), strict=True)
    )
    top = jnp.max(peak, axis=2)
    worth = jnp.exp(peak - top[:, :, None])
    return Found(top, jnp.sum(total * worth, axis=2), jnp.sum(mixed * worth, axis=2))


def _kernel(*refs, names, tiles, block, scale, window, soft_cap, plain):
    """Refs in the order of `names`, then this part's peak `[M, 1]`, total `[M, 1]` and weighted sum `[M, H]`.

    ranges `[3]`, query `[M, H]`, cache_key and cache_value `[S, H]`, and where given positions `[M, 1]`, unseen,
    cache_positions, key_scale and value_scale `[S]`.
    """
    ref = dict(zip(names, refs, strict=False))
    peak_ref, total_ref, sum_ref = refs[len(names) :]
    size, used = ref["ranges"][1], ref["ranges"][2]
    begin = ref["ranges"][0] + pl.program_id(2) // tiles * size
    end = jnp.minimum(begin + size, used)
    query = ref["query"][...]

    def read(i, carry):
        start = begin + i * block
        slots = start + jax.lax.iota(jnp.int32, block)
        inside = slots < end

        def load(name):  # nothing that lies beyond the row's length is read
            where = (pl.ds(start, block),) + (slice(None),) * (len(ref[name].shape) - 1)
            mask = jnp.broadcast_to(inside.reshape((block,) + (1,) * (len(where) - 1)), (block, *ref[name].shape[1:]))
            return triton.load(ref[name].at[where], mask=mask, other=jnp.zeros((), ref[name].dtype))

        key, value = load("cache_key"), load("cache_value")
        key_scale = value_scale = None
        if "key_scale" in ref:
            key, value = key.astype(query.dtype), value.astype(plain)
            key_scale, value_scale = load("key_scale")[None], load("value_scale")[None]
        scored = product(query, key, (1, 1)) * scale
        if key_scale is not None:
            scored = scored * key_scale
        seen = inside[None]
        if "unseen" in ref:
            seen = seen & (load("unseen") == 0)[None]
        if window is not None:
            held = load("cache_positions") if "cache_positions" in ref else slots
            seen = seen & (ref["positions"][...] - held[None] < window)
        found, weights, keep = running(carry[:2], jnp.where(seen, capped(scored, soft_cap), MASKED))
        if value_scale is not None:
            weights = weights * value_scale
        return *found, carry[2] * keep + product(weights.astype(value.dtype), value, (1, 0))

    rows = query.shape[0]
    empty = (
        jnp.full((rows, 1), MASKED, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    peak_ref[...], total_ref[...], sum_ref[...] = jax.lax.fori_loop(
        0, pl.cdiv(jnp.maximum(end - begin, 0), block), read, empty
    )
