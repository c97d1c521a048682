"""Tree attention on an NVIDIA GPU: Triton programs that divide a row's prefix, and a merge of their results.

`shares.py` divides the used part of a cache among programs. A call is one kernel and the merge of the parts, which XLA
fuses. Heads are read in pieces whose widths are powers of two, as Triton requires: 80 is 64 and 16.
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
    product,
    running,
)
from specjax.kernels.tree_attention.shares import FEWEST, ranges, shares, together

BLOCK = 16, 64
"""The fewest and the most cache slots that a program reads at a time: 64 unless heads are so wide that these fill its
memory."""
LARGEST = 64
"""The most queries of a program."""
MEMORY = 2**15
"""The most bytes of a program's queries, and of the keys that it reads at a time; an H100 has room for seven times
this."""


def refusal(operands: Operands) -> str | None:
    """The reason why the kernel cannot take such operands, or None."""
    width = operands.queries.shape[3]
    if width % 16:
        return f"on a GPU the head width has to be a multiple of 16, not {width}"
    return operands.by_distance or operands.other_values or operands.several_scales or operands.no_values


def pieces(width: int) -> tuple[slice, ...]:
    """A head's columns in pieces whose widths are powers of two, the widest first."""
    sizes = [1 << i for i in reversed(range(width.bit_length())) if width >> i & 1]
    return tuple(slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes)))


def attend(operands: Operands, **options) -> jax.Array:
    """See `api.attend_with`. `interpret` runs it on any platform, slowly."""
    return finished(find(operands, **options), operands.sinks)


def find(operands: Operands, *, scale, window, soft_cap, interpret=False) -> Found:
    """The same as `Found`."""
    queries, query_positions = operands.queries, operands.query_positions
    batch, heads, rows, width = queries.shape
    capacity = operands.cache_key.shape[2]
    most = MEMORY // (width * jnp.promote_types(queries.dtype, operands.value.dtype).itemsize)
    most = 1 << most.bit_length() >> 1  # the power of two below, 0 for 0
    block, largest = (min(max(most, fewest), usual) for fewest, usual in (BLOCK, (FEWEST, LARGEST)))
    cut = shares(operands, block, largest)
    tile, tiles = cut.tile, cut.tiles

    whole = lambda x: pl.BlockSpec((None, None, *x.shape[2:]), lambda b, k, p: (b, k) + (0,) * (x.ndim - 2))
    tiled = lambda columns: pl.BlockSpec((None, None, tile, columns), lambda b, k, p: (b, k, p % tiles, 0))
    part = lambda columns: pl.BlockSpec((None, None, None, rows, columns), lambda b, k, p: (b, k, p // tiles, 0, 0))
    pad = tiles * tile - rows
    visible = operands.visible.astype(jnp.int8)
    visible = jnp.pad(jnp.repeat(visible, rows // visible.shape[1], axis=1), ((0, 0), (0, pad), (0, 0)))
    row = lambda b: b if len(visible) > 1 else 0
    inputs = {
        "ranges": (ranges(operands, cut, window), pl.BlockSpec((None, 3), lambda b, k, p: (b, 0))),
        "query": (jnp.pad(queries, ((0, 0), (0, 0), (0, pad), (0, 0))), tiled(width)),
        "cache_key": (operands.cache_key, whole(operands.cache_key)),
        "cache_value": (operands.cache_value, whole(operands.cache_value)),
        "key": (operands.key, whole(operands.key)),
        "value": (operands.value, whole(operands.value)),
        "visible": (visible, pl.BlockSpec((None, tile, visible.shape[2]), lambda b, k, p: (row(b), p % tiles, 0))),
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
    column = jax.ShapeDtypeStruct((batch, heads, cut.parts + 1, rows, 1), jnp.float32)
    sums = jax.ShapeDtypeStruct((batch, heads, cut.parts + 1, rows, width), jnp.float32)
    kernel = functools.partial(
        _kernel,
        names=tuple(inputs),
        shares=cut,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    found = pl.pallas_call(
        kernel,
        out_shape=(column, column, sums),
        grid=(batch, heads, cut.programs),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=(part(1), part(1), part(width)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="tree_attention",
    )(*(x for x, _ in inputs.values()))
    return together(*found)


def _kernel(*refs, names, shares, scale, window, soft_cap):
    """Refs in the order of `names`, then this part's peak `[R, 1]`, total `[R, 1]` and weighted sum `[R, H]`.

    They are for all R queries of a kv-head, of which a program has M, perhaps some beyond the last.

    ranges `[3]`, query `[M, H]`, cache_key and cache_value `[S, H]`, key and value `[P + T, H]`, visible `[M, P + T]`,
    and, if given, positions `[M, 1]`, unseen, cache_positions, key_scale and value_scale `[S]`.
    """
    ref = dict(zip(names, refs, strict=False))
    peak_ref, total_ref, sum_ref = refs[len(names) :]
    part, block = pl.program_id(2) // shares.tiles, shares.block
    size, used = ref["ranges"][1], ref["ranges"][2]
    begin = ref["ranges"][0] + part * size
    end = jnp.minimum(begin + size, used)
    own = ref["key"].shape[0]
    columns = pieces(ref["query"].shape[1])
    query = [ref["query"][:, c] for c in columns]

    def loader(start, inside):  # nothing beyond the row's length is read
        def load(name, *columns):
            where = pl.ds(start, block), *columns
            shape = block, *(c.stop - c.start for c in columns)
            mask = jnp.broadcast_to(inside.reshape((block,) + (1,) * len(columns)), shape)
            return triton.load(ref[name].at[where], mask=mask, other=jnp.zeros((), ref[name].dtype))

        return load

    def meet(carry, key, value, seen, key_scale=None, value_scale=None):
        scored = sum(product(q, k, (1, 1)) for q, k in zip(query, key, strict=True)) * scale
        if key_scale is not None:
            scored = scored * key_scale
        found, weights, keep = running(carry[:2], jnp.where(seen, capped(scored, soft_cap), MASKED))
        if value_scale is not None:
            weights = weights * value_scale
        mixed = (s * keep + product(weights.astype(v.dtype), v, (1, 0)) for s, v in zip(carry[2], value, strict=True))
        return *found, tuple(mixed)

    def read(i, carry):
        start = begin + i * block
        slots = start + jax.lax.iota(jnp.int32, block)
        load = loader(start, slots < end)
        key, value = ([load(name, c) for c in columns] for name in ("cache_key", "cache_value"))
        scales = ()
        if "key_scale" in ref:
            key, value = [k.astype(query[0].dtype) for k in key], [v.astype(ref["value"].dtype) for v in value]
            scales = load("key_scale")[None], load("value_scale")[None]
        seen = (slots < end)[None]
        if "unseen" in ref:
            seen = seen & (load("unseen") == 0)[None]
        if window is not None:
            held = load("cache_positions") if "cache_positions" in ref else slots
            seen = seen & (ref["positions"][...] - held[None] < window)
        return meet(carry, key, value, seen, *scales)

    def read_own(i, carry):
        start = i * block
        inside = start + jax.lax.iota(jnp.int32, block) < own
        load = loader(start, inside)
        key, value = ([load(name, c) for c in columns] for name in ("key", "value"))
        mask = jnp.broadcast_to(inside[None], (rows, block))
        seen = triton.load(ref["visible"].at[:, pl.ds(start, block)], mask=mask, other=jnp.int8(0)) != 0
        return meet(carry, key, value, seen)

    rows = query[0].shape[0]
    found = (
        jnp.full((rows, 1), MASKED, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        tuple(jnp.zeros(q.shape, jnp.float32) for q in query),
    )
    found = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - begin, 0), block), read, found)
    # the part after the cache's last begins where the row ends
    found = jax.lax.fori_loop(0, (part == shares.parts).astype(jnp.int32) * pl.cdiv(own, block), read_own, found)
    first = pl.program_id(2) % shares.tiles * rows
    real = (first + jax.lax.iota(jnp.int32, rows) < sum_ref.shape[0])[:, None]

    def store(ref, column, x):
        triton.store(ref.at[pl.ds(first, rows), column], x, mask=jnp.broadcast_to(real, x.shape))

    peak, total, sums = found
    store(peak_ref, slice(0, 1), peak)
    store(total_ref, slice(0, 1), total)
    for c, x in zip(columns, sums, strict=True):
        store(sum_ref, c, x)
