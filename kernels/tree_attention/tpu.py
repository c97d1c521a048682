"""Tree attention on a TPU: a Mosaic kernel that reads only the filled blocks of every row's cache.

The grid is a list of (row, block of cache slots), with every row's blocks in sequence. Its last bound is dynamic, and
prefetched scalars name the row of each step. A step takes as many kv-heads as fit the chip's memory. A row's first step
includes the block's own keys; the prefix follows, with one running softmax in float32 (Milakov and Gimelshein 2018,
arXiv:1805.02867).

All queries of a kv-head (T * G) share each read. Caches that a TPU stores with adjacent slots (`layouts.slots_last`)
are read in that form, as `[B, K, H, S]`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.layouts import slots_last
from specjax.kernels.tree_attention import blocks
from specjax.kernels.tree_attention.parts import (
    MASKED,
    Found,
    Operands,
    capped,
    product,
    query_facts,
    running,
    unpacked,
)

MAX_KEYS = 256
MAX_ROWS = 1024


def refusal(operands: Operands) -> str | None:
    """The reason why the kernel cannot take such operands, or None."""
    keys, rows = operands.key.shape[2], operands.queries.shape[2]
    if keys > MAX_KEYS:
        return f"a block and its past may hold {MAX_KEYS} keys, not {keys}"
    if rows > MAX_ROWS:
        return f"a kv-head may have {MAX_ROWS} queries (slots times heads per kv-head), not {rows}"
    return operands.by_distance or operands.other_values or operands.several_scales


def attend(operands: Operands, **options) -> jax.Array:
    """See `api.attend_with`. `interpret` runs it on any platform, slowly, with emulated TPU memory spaces. `tiles`
    replaces `blocks.tiles`."""
    return _call(operands, **options, whole=True)[0]


def find(operands: Operands, **options) -> Found:
    """The same as `Found`."""
    sums, peak, total = _call(operands, **options, whole=False)
    return Found(peak, total, sums)


def _call(operands: Operands, *, scale, window, soft_cap, whole, interpret=False, tiles=None):
    """The finished attention or, if not `whole`, sums, peaks and totals."""
    queries, query_positions = operands.queries, operands.query_positions
    (batch, heads, rows, width), capacity = queries.shape, operands.cache_key.shape[2]
    turned = slots_last(capacity, width)
    tiles = blocks.tiles(operands, window) if tiles is None else tiles
    size, parts, most = tiles.slots, tiles.parts, pl.cdiv(capacity, tiles.slots)

    used = jnp.minimum(operands.length, capacity)
    first = jnp.zeros_like(used)
    if window is not None and operands.cache_positions is None:
        first = jnp.clip((jnp.min(query_positions, axis=1) - window + 1) // size, 0, most - 1)
    count = jnp.maximum(pl.cdiv(used, size) - first, 1)  # blocks of a row; an empty row needs one step too
    start, row_of, steps = schedule(count, parts, most)
    listed = row_of.size // parts

    words = pl.cdiv(operands.key.shape[2], 32)
    facts = query_facts(operands.visible, None if window is None else query_positions, batch, rows)
    pad = ((0, 0), (0, 0), (0, 32 * words - operands.key.shape[2]), (0, 0))
    key = jnp.pad(operands.key, pad)

    def spec(shape, *index):  # a block and its place: "b", "k", 0, or "s" for the blocks of the cache
        def at(p, k, t, used, first, count, start, row_of):
            b = row_of[p * listed + t]
            s = first[b] + jnp.minimum(t - start[b], count[b] - 1)
            return tuple({"b": b, "k": k, "s": s}.get(i, 0) for i in index)

        return pl.BlockSpec(shape, at)

    every = lambda x: spec((None, tiles.heads, *x.shape[2:]), "b", "k", 0, 0)
    cached = spec((None, tiles.heads, size, width), "b", "k", "s", 0)
    if turned:
        cached = spec((None, tiles.heads, width, size), "b", "k", 0, "s")
    scales = spec((None, tiles.heads, 1, size), "b", "k", 0, "s")

    def stays(x):  # the compiler would prefetch whole rows into VMEM, not only their live blocks
        x = x.swapaxes(2, 3) if turned else x
        return x if interpret or (width % 128 and not turned) else pltpu.with_memory_space_constraint(x, pltpu.HBM)

    inputs = {
        "query": (queries, every(queries)),
        "key": (key, every(key)),
        "facts": (facts, spec((None, *facts.shape[1:]), "b", 0, 0)),
        "cache_key": (stays(operands.cache_key), cached),
    }
    if operands.value is not None:
        inputs["value"] = jnp.pad(operands.value, pad), every(key)
        inputs["cache_value"] = stays(operands.cache_value), cached
    if operands.unseen is not None:
        inputs["unseen"] = operands.unseen.astype(jnp.int32)[:, None], spec((None, 1, size), "b", 0, "s")
    if operands.cache_positions is not None:
        inputs["cache_positions"] = operands.cache_positions[:, None], spec((None, 1, size), "b", 0, "s")
    if operands.key_scale is not None:
        inputs["key_scale"] = operands.key_scale.astype(jnp.float32)[:, :, None], scales
    if operands.value_scale is not None:
        inputs["value_scale"] = operands.value_scale.astype(jnp.float32)[:, :, None], scales
    if operands.sinks is not None and whole:
        inputs["sinks"] = operands.sinks[:, :, None], spec((tiles.heads, rows, 1), "k", 0, 0)
    results = [jax.ShapeDtypeStruct(queries.shape, jnp.float32)]
    if not whole:
        results += [jax.ShapeDtypeStruct((batch, heads, rows, 1), jnp.float32)] * 2
    kernel = functools.partial(
        _kernel, names=tuple(inputs), listed=listed, size=size, chunk=blocks.chunk(size), ragged=capacity % size != 0,
        turned=turned, scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip
    return pl.pallas_call(
        kernel,
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(parts, heads // tiles.heads, steps),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[every(x) for x in results],
            scratch_shapes=[pltpu.VMEM((tiles.heads, rows, columns), jnp.float32) for columns in (1, 1, width)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=pltpu.InterpretParams(uninitialized_memory="nan") if interpret else False,
        name="tree_attention",
    )(used, first, count, start, row_of, *(x for x, _ in inputs.values()))


def schedule(count: jax.Array, parts: int, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The list of steps.

    Args:
      count: `[B]` int32, steps of every row, 1 to `most`.
      parts: a divisor of B; each part of the rows has its own list, for its own core.
      most: blocks of a row's cache.

    Returns:
      The step of its part's list at which each row begins, `[B]`; the row of each step, `[B * most]`; and the length of
      the longest list. The parts' lists are concatenated and equally long; after its end, a list repeats its last row.
    """
    each = count.reshape(parts, -1)
    ends = jnp.cumsum(each, axis=1)
    rows = each.shape[1]
    at = jnp.arange(rows * most)
    local = jnp.sum(at[None, :, None] >= ends[:, None, :-1], axis=2, dtype=jnp.int32)
    row_of = local + rows * jnp.arange(parts, dtype=jnp.int32)[:, None]
    return (ends - each).reshape(-1), row_of.reshape(-1), jnp.max(ends[:, -1])


def _kernel(
    used_ref, first_ref, count_ref, start_ref, row_ref, *refs, names, listed, size, chunk, ragged, turned, scale, window,
    soft_cap,
):  # fmt: skip
    """Refs for the K heads of a step: those of `names`, then outputs, then scratch.

    Outputs are the result `[K, M, H]`, or sums `[K, M, H]`, peak and total `[K, M, 1]`. Scratch is peak, total and sums
    so far.

    query `[K, M, H]`, key and value `[K, 32 W, H]`, facts `[M, W or W + 1]`, cache_key and cache_value `[K, block, H]`,
    or `[K, H, block]` if `turned`, with values only where they are not the keys. If given, unseen and cache_positions
    `[1, block]`, key_scale and value_scale `[K, 1, block]`, and sinks `[K, M, 1]`.
    """
    ref = dict(zip(names, refs, strict=False))
    value_ref, cache_value_ref = ref.get("value", ref["key"]), ref.get("cache_value", ref["cache_key"])
    out_ref, *stats = refs[len(names) : -3]
    peak_ref, total_ref, sum_ref = refs[-3:]
    step = pl.program_id(2)
    row = row_ref[pl.program_id(0) * listed + step]
    block = step - start_ref[row]
    words = ref["key"].shape[1] // 32
    heads, slot_axis = ref["query"].shape[0], 1 if turned else 0
    begin = (first_ref[row] + block) * size

    def scores(head, key, channels=1):
        return product(ref["query"][head], key, (1, channels)) * scale

    def add(head, scored, value, value_scale, carry, slots=0):
        (peak_ref[head], total_ref[head]), weights, keep = running(carry, scored)
        if value_scale is not None:
            weights = weights * value_scale
        return keep, product(weights.astype(value.dtype), value, (1, slots))

    @pl.when(block == 0)
    def own():
        seen = unpacked(ref["facts"][:, :words])

        @pl.loop(0, heads)
        def of(head):
            scored = jnp.where(seen, capped(scores(head, ref["key"][head]), soft_cap), MASKED)
            shape = peak_ref.shape[1:]
            before = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
            if "sinks" in ref:  # counts as a score before all others
                before = ref["sinks"][head], jnp.ones(shape, jnp.float32)
            _, sum_ref[head] = add(head, scored, value_ref[head], None, before)

    @pl.when((block < count_ref[row]) & (begin < used_ref[row]))
    def prefix():
        @pl.loop(0, heads)
        def of(head):
            @pl.loop(0, size // chunk)
            def read(i):
                at = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
                slots = begin + i * chunk + jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
                seen = slots < used_ref[row]
                if "unseen" in ref:
                    seen = seen & (ref["unseen"][:, at] == 0)
                if window is not None:
                    held = ref["cache_positions"][:, at] if "cache_positions" in ref else slots
                    seen = seen & (ref["facts"][:, words:] - held < window)
                part = (head, slice(None), at) if turned else (head, at)
                key, value = ref["cache_key"][part], cache_value_ref[part]
                key_scale = value_scale = None
                if "key_scale" in ref:
                    key_scale = ref["key_scale"][head, :, at]
                    value_scale = ref["value_scale"][head, :, at] if "value_scale" in ref else key_scale
                    key, value = key.astype(ref["query"].dtype), value.astype(value_ref.dtype)
                if ragged:  # the last block reads past the cache, where values are undefined, and 0 times NaN is NaN
                    down = begin + i * chunk + jax.lax.broadcasted_iota(jnp.int32, value.shape, slot_axis)
                    value = jnp.where(down < used_ref[row], value, jnp.zeros_like(value))
                    if value_scale is not None:
                        value_scale = jnp.where(slots < used_ref[row], value_scale, 0.0)
                scored = scores(head, key, 1 - slot_axis)
                if key_scale is not None:
                    scored = scored * key_scale
                scored = jnp.where(seen, capped(scored, soft_cap), MASKED)
                keep, mixed = add(head, scored, value, value_scale, (peak_ref[head], total_ref[head]), slot_axis)
                sum_ref[head] = sum_ref[head] * keep + mixed

    @pl.when(block == count_ref[row] - 1)
    def finish():
        if stats:
            out_ref[...], stats[0][...], stats[1][...] = sum_ref[...], peak_ref[...], total_ref[...]
        else:
            out_ref[...] = sum_ref[...] / jnp.maximum(total_ref[...], 1e-30)
