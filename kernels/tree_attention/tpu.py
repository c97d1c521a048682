"""Tree attention on a TPU: a Mosaic kernel that reads, of every row's cache, the blocks that the row has filled.

One program a row, kv-head and block of cache slots. The block's own keys come first, then the prefix, with one running
softmax in float32 (Milakov and Gimelshein 2018, arXiv:1805.02867). All queries of a kv-head (T * G) share what is read.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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

BLOCKS = (512, 256, 128)
"""Cache slots read at a time: the first that divides the capacity."""
MAX_KEYS = 256
MAX_ROWS = 1024


def refusal(operands: Operands) -> str | None:
    """Why the kernel cannot take such operands, or None."""
    keys, rows = operands.key.shape[2], operands.queries.shape[2]
    if keys > MAX_KEYS:
        return f"a block and its past may hold {MAX_KEYS} keys, not {keys}"
    if rows > MAX_ROWS:
        return f"a kv-head may have {MAX_ROWS} queries (slots times heads per kv-head), not {rows}"
    return None


def attend(operands: Operands, **options) -> jax.Array:
    """See `api.attend_with`. `interpret` runs it on any platform, slowly, with a TPU's memory spaces emulated."""
    return _call(operands, **options, whole=True)[0]


def find(operands: Operands, **options) -> Found:
    """The same as `Found`."""
    sums, peak, total = _call(operands, **options, whole=False)
    return Found(peak, total, sums)


def _call(operands: Operands, *, scale, window, soft_cap, whole, interpret=False):
    """The finished attention, or where it is not `whole` sums, peaks and totals."""
    queries, query_positions = operands.queries, operands.query_positions
    batch, heads, rows, width = queries.shape
    capacity = operands.cache_key.shape[2]
    size = min(capacity, next((size for size in BLOCKS if capacity % size == 0), BLOCKS[0]))
    blocks = pl.cdiv(capacity, size)

    used = jnp.minimum(operands.length, capacity)
    first = jnp.zeros_like(used)
    if window is not None and operands.cache_positions is None:
        first = jnp.maximum(jnp.min(query_positions, axis=1) - window + 1, 0) // size
    count = jnp.maximum(pl.cdiv(used, size) - first, 0)  # blocks that a row reads

    words = pl.cdiv(operands.key.shape[2], 32)
    facts = query_facts(operands.visible, None if window is None else query_positions, batch, rows)
    pad = ((0, 0), (0, 0), (0, 32 * words - operands.key.shape[2]), (0, 0))
    key, value = jnp.pad(operands.key, pad), jnp.pad(operands.value, pad)

    def spec(shape, *index):  # a block, and where it lies: "b", "k", 0, or "s" for the blocks of the cache
        def at(b, k, j, used, first, count):
            s = jnp.minimum(first[b] + jnp.minimum(j, jnp.maximum(count[b] - 1, 0)), blocks - 1)
            return tuple({"b": b, "k": k, "s": s}.get(i, 0) for i in index)

        return pl.BlockSpec(shape, at)

    every = lambda x: spec((None, None, *x.shape[2:]), "b", "k", 0, 0)
    cached = spec((None, None, size, width), "b", "k", "s", 0)
    scales = spec((None, None, 1, size), "b", "k", 0, "s")
    inputs = {
        "query": (queries, every(queries)),
        "key": (key, every(key)),
        "value": (value, every(value)),
        "facts": (facts, spec((None, *facts.shape[1:]), "b", 0, 0)),
        "cache_key": (operands.cache_key, cached),
        "cache_value": (operands.cache_value, cached),
    }
    if operands.unseen is not None:
        inputs["unseen"] = operands.unseen.astype(jnp.int32)[:, None], spec((None, 1, size), "b", 0, "s")
    if operands.cache_positions is not None:
        inputs["cache_positions"] = operands.cache_positions[:, None], spec((None, 1, size), "b", 0, "s")
    if operands.key_scale is not None:
        inputs["key_scale"] = operands.key_scale.astype(jnp.float32)[:, :, None], scales
        inputs["value_scale"] = operands.value_scale.astype(jnp.float32)[:, :, None], scales
    if operands.sinks is not None and whole:
        inputs["sinks"] = operands.sinks[:, :, None], spec((None, rows, 1), "k", 0, 0)
    results = [jax.ShapeDtypeStruct(queries.shape, jnp.float32)]
    if not whole:
        results += [jax.ShapeDtypeStruct((batch, heads, rows, 1), jnp.float32)] * 2
    kernel = functools.partial(
        _kernel, names=tuple(inputs), ragged=capacity % size != 0, scale=scale, window=window, soft_cap=soft_cap
    )
    return pl.pallas_call(
        kernel,
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, jnp.maximum(jnp.max(count), 1)),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[every(x) for x in results],
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32) for columns in (1, 1, width)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=pltpu.InterpretParams(uninitialized_memory="nan") if interpret else False,
        name="tree_attention",
    )(used, first, count, *(x for x, _ in inputs.values()))


def _kernel(used_ref, first_ref, count_ref, *refs, names, ragged, scale, window, soft_cap):
    """Refs in the order of `names`, then the result `[M, H]`, or sums `[M, H]`, peak and total `[M, 1]`, and then peak, total
    and sums so far.

    query `[M, H]`, key and value `[32 W, H]`, facts `[M, W or W + 1]`, cache_key and cache_value `[block, H]`, and where
    given unseen, cache_positions, key_scale and value_scale `[1, block]`, and sinks `[M, 1]`.
    """
    ref = dict(zip(names, refs, strict=False))
    out_ref, *stats = refs[len(names) : -3]
    peak_ref, total_ref, sum_ref = refs[-3:]
    row, block = pl.program_id(0), pl.program_id(2)
    words = ref["key"].shape[0] // 32

    def scores(key):
        return product(ref["query"][...], key, (1, 1)) * scale

    def add(scored, value, value_scale, carry):
        carry, weights, keep = running(carry, scored)
        peak_ref[...], total_ref[...] = carry
        if value_scale is not None:
            weights = weights * value_scale
        return keep, product(weights.astype(value.dtype), value, (1, 0))

    @pl.when(block == 0)
    def own():
        seen = unpacked(ref["facts"][:, :words])
        scored = jnp.where(seen, capped(scores(ref["key"][...]), soft_cap), MASKED)
        before = jnp.full(peak_ref.shape, MASKED, jnp.float32), jnp.zeros(total_ref.shape, jnp.float32)
        if "sinks" in ref:  # a score that was met before all others
            before = ref["sinks"][...], jnp.ones(total_ref.shape, jnp.float32)
        _, sum_ref[...] = add(scored, ref["value"][...], None, before)

    @pl.when(block < count_ref[row])
    def prefix():
        key, value = ref["cache_key"][...], ref["cache_value"][...]
        start = (first_ref[row] + block) * key.shape[0]
        slots = start + jax.lax.broadcasted_iota(jnp.int32, (1, key.shape[0]), 1)
        seen = slots < used_ref[row]
        if "unseen" in ref:
            seen = seen & (ref["unseen"][...] == 0)
        if window is not None:
            held = ref["cache_positions"][...] if "cache_positions" in ref else slots
            seen = seen & (ref["facts"][:, words:] - held < window)
        key_scale = value_scale = None
        if "key_scale" in ref:
            key_scale, value_scale = ref["key_scale"][...], ref["value_scale"][...]
            key, value = key.astype(ref["query"].dtype), value.astype(ref["value"].dtype)
        if ragged:  # the last block reads past the cache, where anything may lie, and 0 times NaN is NaN
            down = start + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
            value = jnp.where(down < used_ref[row], value, jnp.zeros_like(value))
            if value_scale is not None:
                value_scale = jnp.where(slots < used_ref[row], value_scale, 0.0)
        scored = scores(key)
        if key_scale is not None:
            scored = scored * key_scale
        scored = jnp.where(seen, capped(scored, soft_cap), MASKED)
        keep, mixed = add(scored, value, value_scale, (peak_ref[...], total_ref[...]))
        sum_ref[...] = sum_ref[...] * keep + mixed

    @pl.when(block == pl.num_programs(2) - 1)
    def finish():
        if stats:
            out_ref[...], stats[0][...], stats[1][...] = sum_ref[...], peak_ref[...], total_ref[...]
        else:
            out_ref[...] = sum_ref[...] / jnp.maximum(total_ref[...], 1e-30)
