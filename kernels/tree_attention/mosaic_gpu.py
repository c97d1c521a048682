"""Tree attention on an NVIDIA Hopper GPU: Mosaic programs of one warpgroup with WGMMA products.

A program reads its part of a row in blocks, which the tensor memory accelerator (TMA) copies into shared memory some
blocks ahead. Scores and sums stay in registers; weights pass through shared memory to the second product. Parts are cut
and merged as in the Triton kernel (`shares.py`).
"""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels.tree_attention.parts import MASKED, Found, Operands, capped, finished, product, query_facts
from specjax.kernels.tree_attention.shares import ranges, shares, together

BLOCK = 64
"""Cache slots read at a time, and the queries of a warpgroup's product, some of which may be padding."""
WIDTHS = 64, 128
"""The supported widths of heads."""
AHEAD = 2**16
"""Bytes of keys and values that a program has requested or reads; a multiprocessor has room for two programs."""
PIECE = 32
"""Channels of the sums written at a time."""
AXES = "row", "head", "program"
WORD = 32
WGMMA = plgpu.Layout.WGMMA
ROWS, SLOTS = WGMMA.reduce(1), WGMMA.reduce(0)
_index = inspect.signature(plgpu.load).parameters.get("idx")
WHOLE = ((),) if _index is not None and _index.default is inspect.Parameter.empty else ()
"""The further arguments of `plgpu.load`: an index up to jax 0.10, none later."""


def refusal(operands: Operands) -> str | None:
    """The reason why the kernel cannot take such operands, or None."""
    width, capacity, dtype = operands.queries.shape[3], operands.cache_key.shape[2], operands.cache_key.dtype
    capability = getattr(
        jax.devices()[0], "compute_capability", "9.0"
    )  # without a GPU, programs for one are compiled ahead of time
    if not capability.startswith("9."):
        return f"it is made for Hopper, of compute capability 9.0, and the device has {capability}"
    if dtype not in (jnp.bfloat16, jnp.float16) or operands.queries.dtype != dtype:
        return f"its queries and cache are both bfloat16 or both float16, not {operands.queries.dtype} and {dtype}"
    if width not in WIDTHS:
        return f"its heads have a width of {' or '.join(map(str, WIDTHS))}, not {width}"
    if capacity % 8 or capacity < BLOCK:
        return f"its caches have at least {BLOCK} slots, a multiple of 8, not {capacity}"
    return operands.by_distance or operands.other_values or operands.several_scales or operands.no_values


def attend(operands: Operands, **options) -> jax.Array:
    """See `api.attend_with`. `interpret` runs it on any platform, slowly."""
    return finished(find(operands, **options), operands.sinks)


def find(operands: Operands, *, scale, window, soft_cap, interpret=False) -> Found:
    """The same as `Found`."""
    o = operands
    batch, heads, rows, width = o.queries.shape
    cut = shares(o, BLOCK, BLOCK)
    queries, own = cut.tiles * cut.tile, pl.cdiv(o.key.shape[2], BLOCK) * BLOCK
    positions = None if window is None else o.query_positions
    facts = query_facts(filled(o.visible, 2, own), positions, batch, rows).swapaxes(1, 2)
    inputs = {
        "ranges": ranges(o, cut, window),
        "facts": filled(facts, 2, queries - cut.tile + BLOCK),
        "query": filled(o.queries, 2, queries),
        "cache_key": o.cache_key,
        "cache_value": o.cache_value,
        "key": filled(o.key, 2, own),
        "value": filled(o.value, 2, own),
    }
    if o.unseen is not None:
        inputs["unseen"] = o.unseen.astype(jnp.int32)
    if o.cache_positions is not None:
        inputs["cache_positions"] = o.cache_positions
    stages = AHEAD // (2 * BLOCK * width * o.cache_key.dtype.itemsize)
    blocks = shared((stages, BLOCK, width), o.cache_key.dtype)
    column = jax.ShapeDtypeStruct((batch, heads, cut.parts + 1, queries), jnp.float32)
    kernel = functools.partial(
        _kernel,
        names=tuple(inputs),
        shares=cut,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        on=Interpreted if interpret else Warpgroup,
    )
    peak, total, sums = plgpu.kernel(
        kernel,
        out_type=(column, column, jax.ShapeDtypeStruct((*column.shape, width), jnp.float32)),
        grid=(batch, heads, cut.programs),
        grid_names=AXES,
        scratch_types={
            "query": shared((BLOCK, width), o.queries.dtype),
            "keys": blocks,
            "values": blocks,
            "weights": shared((BLOCK, BLOCK), o.value.dtype),
            "columns": plgpu.SMEM((2, BLOCK), jnp.float32),
            "sums": shared((BLOCK, PIECE), jnp.float32),
            "query_there": plgpu.Barrier(),
            "keys_there": plgpu.Barrier(num_barriers=stages),
            "values_there": plgpu.Barrier(num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter() if interpret else None,
        kernel_name="tree_attention",
    )(*inputs.values())
    return together(peak[:, :, :, :rows, None], total[:, :, :, :rows, None], sums[:, :, :, :rows])


def filled(x, axis, size):
    """An array padded with zeros to a size."""
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def shared(shape, dtype):
    """Shared memory for WGMMA: swizzled tiles of 8 rows and 128 bytes."""
    tile = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(128)))


def interpreter():
    """JAX's interpreter of Mosaic GPU programs, which has a public name since 0.11.2."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


class Warpgroup:
    """A warpgroup's operations on values in registers, which have layouts."""

    @staticmethod
    def laid(x, layout):
        """A value in another layout, or a new value in its first layout."""
        return plgpu.layout_cast(x, layout)

    @staticmethod
    def load(ref, layout):
        """A value from main memory."""
        return plgpu.load(ref, *WHOLE, layout=layout, optimized=False)

    @staticmethod
    def product(a, b):
        """The product of two arrays in shared memory, in float32."""

        def multiplied(sums):
            plgpu.wgmma(sums, a, b)
            return sums[...]

        return pl.run_scoped(multiplied, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))

    @classmethod
    def scores(cls, query, keys):
        """The scores of queries `[M, H]` and keys `[S, H]`."""
        return cls.product(query, keys.transpose((1, 0)))


class Interpreted(Warpgroup):
    """The same operations for the interpreter, which has no layouts and no product with a transposed array."""

    laid = staticmethod(lambda x, layout: x)
    load = staticmethod(lambda ref, layout: ref[...])
    scores = staticmethod(lambda query, keys: product(query[...], keys[...], (1, 1)))


class Source(NamedTuple):
    """Keys and values of which a program reads blocks.

    Attributes:
      key: `[B, K, S, H]`, in main memory.
      value: as `key`.
      count: the number of blocks.
      place: maps a block's number to its first slot.
      seen: maps a block's number to the slots that each query sees, `[M, S]` bool.
    """

    key: jax.Ref
    value: jax.Ref
    count: jax.Array
    place: Callable[[jax.Array], jax.Array]
    seen: Callable[[jax.Array], jax.Array]


def _kernel(
    *refs, names, shares, scale, window, soft_cap, on,
    query, keys, values, weights, columns, sums, query_there, keys_there, values_there,
):  # fmt: skip
    """Refs in the order of `names`, then peaks and totals `[B, K, parts, M]` and weighted sums `[B, K, parts, M, H]`.

    ranges `[B, 3]`, facts `[B, W, M]`, query `[B, K, M, H]`, cache_key and cache_value `[B, K, S, H]`, key and value
    `[B, K, P + T, H]`, and, if given, unseen and cache_positions `[B, S]`, all in main memory. The rest is shared
    memory, and barriers to wait for the end of copies.
    """
    ref = dict(zip(names, refs, strict=False))
    peak_ref, total_ref, sum_ref = refs[len(names) :]
    row, head, program = (lax.axis_index(name) for name in AXES)
    part, first = program // shares.tiles, program % shares.tiles * shares.tile
    stages, _, width = keys.shape

    square = BLOCK, BLOCK
    of_rows = lambda x, columns=BLOCK: on.laid(lax.broadcast_in_dim(x, (BLOCK, columns), (0,)), WGMMA)
    fact = lambda i: of_rows(on.load(ref["facts"].at[row, i, pl.ds(first, BLOCK)], ROWS))
    slot_fact = lambda name, start: on.load(ref[name].at[row, pl.ds(start, BLOCK)], SLOTS)
    of_slots = lambda x: on.laid(lax.broadcast_in_dim(x, square, (1,)), WGMMA)
    number = on.laid(lax.broadcasted_iota(jnp.int32, square, 1), WGMMA)

    size, used = ref["ranges"][row, 1], ref["ranges"][row, 2]
    begin = ref["ranges"][row, 0] + part * size
    end = jnp.minimum(begin + size, used)
    own = ref["key"].shape[2] // BLOCK
    position = None if window is None else fact(own * BLOCK // WORD)

    def place(i):  # a cache's last block may overlap the previous one
        return jnp.minimum(begin + i * BLOCK, ref["cache_key"].shape[2] - BLOCK)

    def seen(i):
        slots = place(i) + number
        seen = (slots >= begin + i * BLOCK) & (slots < end)
        if "unseen" in ref:
            seen = seen & (of_slots(slot_fact("unseen", place(i))) == 0)
        if window is not None:
            held = of_slots(slot_fact("cache_positions", place(i))) if "cache_positions" in ref else slots
            seen = seen & (position - held < window)
        return seen

    def own_seen(i):
        words = jnp.where(number < WORD, fact(2 * i), fact(2 * i + 1))
        return (words >> (number & (WORD - 1))) & 1 == 1

    count = pl.cdiv(jnp.maximum(end - begin, 0), BLOCK)
    cache = Source(ref["cache_key"], ref["cache_value"], count, place, seen)
    # the part after the cache's last begins where the row ends
    own_count = jnp.where(part == shares.parts, own, 0)
    block = Source(ref["key"], ref["value"], own_count, lambda i: i * BLOCK, own_seen)

    def fetch(source, i, matrix, into, there):
        slots = matrix.at[row, head, pl.ds(source.place(i), BLOCK)]
        plgpu.copy_gmem_to_smem(slots, into.at[i % stages], there.at[i % stages])

    def begin_reading(source):
        @pl.loop(0, jnp.minimum(stages, source.count))
        def _(i):
            fetch(source, i, source.key, keys, keys_there)
            fetch(source, i, source.value, values, values_there)

    def read(source, found):
        def meet(i, found):
            (peak, total, mixed), at, later = found, i % stages, i + stages
            plgpu.barrier_wait(keys_there.at[at])
            scored = on.scores(query, keys.at[at])
            pl.when(later < source.count)(lambda: fetch(source, later, source.key, keys, keys_there))
            scored = jnp.where(source.seen(i), capped(scored * scale, soft_cap), MASKED)
            new = jnp.maximum(peak, jnp.max(scored, axis=1))
            worth = jnp.where(scored > MASKED / 2, jnp.exp(scored - of_rows(new)), 0.0)
            keep = jnp.exp(peak - new)
            weights[...] = worth.astype(weights.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(values_there.at[at])
            more = on.product(weights, values.at[at])
            pl.when(later < source.count)(lambda: fetch(source, later, source.value, values, values_there))
            return new, total * keep + jnp.sum(worth, axis=1), mixed * of_rows(keep, width) + more

        return lax.fori_loop(0, source.count, meet, found)

    mine = pl.ds(first, shares.tile)
    here = pl.ds(0, shares.tile)
    plgpu.copy_gmem_to_smem(ref["query"].at[row, head, mine], query.at[here], query_there)
    begin_reading(cache)
    begin_reading(block)  # one of the two loops has no blocks
    plgpu.barrier_wait(query_there)
    found = on.laid(jnp.full(BLOCK, MASKED), ROWS), on.laid(jnp.zeros(BLOCK), ROWS)
    found = read(cache, (*found, on.laid(jnp.zeros((BLOCK, width)), WGMMA)))
    columns[0], columns[1], mixed = read(block, found)

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(columns.at[0, here], peak_ref.at[row, head, part, mine])
    plgpu.copy_smem_to_gmem(columns.at[1, here], total_ref.at[row, head, part, mine])
    for start in range(0, width, PIECE):
        sums[...] = mixed[:, start : start + PIECE]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums.at[here], sum_ref.at[row, head, part, mine, pl.ds(start, PIECE)])
        plgpu.wait_smem_to_gmem(0)
