"""The cache write as one Mosaic kernel for all given arrays.

A cache's slots are stored in tiles, the smallest units that can be moved. So the tiles that a run touches are read, the
run is laid over them, and they are written back. Reads of several rows overlap. Caches that a TPU stores transposed
have another kernel (`tpu_slots_last`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.kv_commit import tpu_slots_last
from specjax.kernels.layouts import slots_last

VMEM_BYTES = 2**24
"""The most bytes of the rows written at a time, over all arrays."""
SEMAPHORES = 256
"""The most semaphores: a core has 512 or more, of which others take some."""
SCALARS = 2**16
"""The most numbers of block slots in scalar memory."""
INTERPRETER = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
_LANES = 128


def tile(dtype) -> int:
    """Cache slots in a tile of a type."""
    return 32 // jnp.dtype(dtype).itemsize


def window(count: int, dtype) -> int:
    """The most slots of all tiles that a run may touch."""
    return _whole(count + tile(dtype) - 1, tile(dtype))


def refusal(shape, caches, news, src, dst) -> str | None:
    """The reason why the kernel cannot write these caches; None if it can.

    Args:
      shape: the shape of a device's part of each, `[B, K, S, H]`.
      caches: see `api.kv_commit`, as for the others.
    """
    dtype, count = caches[0].dtype, (news[0] if src is None else src).shape[1]
    if dst.ndim != 1:
        return "it writes runs (dst [B]), and scattered slots are XLA's"
    if any(x.shape != caches[0].shape or x.dtype != dtype for x in caches):
        return "it takes caches of one shape and type in a call"
    if len(shape) != 4:
        return f"it writes caches [B, K, S, H], and these have {len(shape)} axes"
    if slots_last(*shape[2:]):
        why = tpu_slots_last.refusal(shape, dtype)
        if why is not None:
            return why
    elif shape[3] % _LANES:
        return f"heads of {shape[3]} are no multiple of {_LANES}, and a TPU keeps them another way than the kernel reads them"
    elif shape[2] % tile(dtype) or window(count, dtype) > shape[2]:
        return f"it needs a capacity of whole tiles of {tile(dtype)} slots, at least {window(count, dtype)}, not {shape[2]}"
    if len(caches) > SEMAPHORES:
        return f"{len(caches)} caches are more than the {SEMAPHORES} that it writes in a call"
    if shape[0] * count > SCALARS:
        return f"{shape[0]} runs of {count} slots are more than the {SCALARS} slots that it may be told of"
    if sum(_bytes(shape, caches, news, count)) > VMEM_BYTES:
        return (
            f"runs of {count} slots of {len(caches)} caches take more than the {VMEM_BYTES >> 20} MiB that it works in"
        )
    return None


def _bytes(shape, caches, news, count):
    """The bytes that all rows share in VMEM, and that each row takes: windows and new slots."""
    dtype, (_, heads, slots, width) = caches[0].dtype, shape
    if slots_last(slots, width):
        return tpu_slots_last.sizes(shape, news[0].shape[1], count, len(caches), dtype)
    numbers = (window(count, dtype) + _whole(news[0].shape[1], tile(dtype))) * heads * width
    return 4 * numbers, len(caches) * numbers * jnp.dtype(dtype).itemsize


def _whole(size, unit):
    return -(-size // unit) * unit


def commit(caches, news, src, dst, span, *, interpret=False):
    """See `api.kv_commit`, for operands that `refusal` accepts.

    A run's slots outside the cache are dropped. So are slots outside the half-open range that a row of `span` `[B, 2]`
    gives."""
    batch, heads, slots, width = caches[0].shape
    block, dtype, arrays = news[0].shape[1], caches[0].dtype, len(caches)
    count = block if src is None else src.shape[1]
    if src is None:
        src = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32)[None], (batch, block))
    src = jnp.clip(jnp.where(src < 0, src + block, src), 0, block - 1)
    shared, each = _bytes(caches[0].shape, caches, news, count)
    rows = min((VMEM_BYTES - shared) // each, SEMAPHORES // arrays, batch)
    turned = slots_last(slots, width)
    moved = (
        tpu_slots_last.moved(caches[0].shape, block, count, arrays, dtype) if turned else _moved(caches, news, count)
    )
    call = dict(
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=2 * VMEM_BYTES),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=INTERPRETER if interpret else False,
        name="kv_commit",
    )
    written = (tpu_slots_last.commit if turned else _commit)(caches, news, src, dst, span, rows, **call)
    # a program that returns the caches unchanged fails the compiler's own check of their memory space
    return tuple(written) if interpret else jax.lax.optimization_barrier(tuple(written))


def _commit(caches, news, src, dst, span, rows, **call):
    batch, heads, _, width = caches[0].shape
    block, dtype, arrays = news[0].shape[1], caches[0].dtype, len(caches)
    size = window(src.shape[1], dtype)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, arrays=arrays, rows=rows),
        # named as main memory: otherwise a small cache is copied into VMEM as a whole, and back
        out_shape=tuple(pltpu.HBM(x.shape, x.dtype) for x in caches),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(-(-batch // rows),),
            in_specs=[anywhere] * (2 * arrays),
            out_specs=(anywhere,) * arrays,
            scratch_shapes=[
                pltpu.VMEM((arrays, rows, heads, size, width), dtype),
                pltpu.VMEM((arrays, rows, heads, block, width), dtype),
                pltpu.VMEM((heads, size, width), jnp.float32),
                pltpu.VMEM((heads, block, width), jnp.float32),
                pltpu.SemaphoreType.DMA((arrays, rows)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={3 + arrays + i: i for i in range(arrays)},
        **call,
    )(src, dst, span, *(x.astype(dtype).swapaxes(1, 2) for x in news), *caches)


def _moved(caches, news, count):
    """The bytes of all windows, read and written, and of the new values."""
    batch, heads, _, width = caches[0].shape
    slots = 2 * window(count, caches[0].dtype) + news[0].shape[1]
    return len(caches) * batch * heads * slots * width * caches[0].dtype.itemsize


def _kernel(src, dst, span, *refs, arrays, rows):
    news, caches = refs[:arrays], refs[2 * arrays : 3 * arrays]  # the outputs, which alias the caches
    # the last two are semaphores: for reads by array and row, and for all writes
    windows, blocks, laid, fresh, here, back = refs[3 * arrays :]
    batch, capacity = caches[0].shape[0], caches[0].shape[2]
    size, slots = windows.shape[3], tile(windows.dtype)

    def first(row):
        """The first slot of a row's window, which begins at a tile and is inside the cache."""
        return pl.multiple_of(jnp.clip(jax.lax.div(dst[row], slots), 0, (capacity - size) // slots) * slots, slots)

    def part(row):
        """The slots of a row's run that are written if they are in the cache."""
        return jnp.maximum(span[row, 0], 0), jnp.minimum(span[row, 1], src.shape[1])

    def touches(row):
        low, high = part(row)
        at = dst[row] - first(row)
        return (low < high) & (at + high > 0) & (at + low < size)

    def fetch(array, place, row):
        return pltpu.make_async_copy(news[array].at[row], blocks.at[array, place], here.at[array, place])

    def load(array, place, row):
        there = caches[array].at[row, :, pl.ds(first(row), size)]
        return pltpu.make_async_copy(there, windows.at[array, place], here.at[array, place])

    def store(array, place, row):
        there = caches[array].at[row, :, pl.ds(first(row), size)]
        return pltpu.make_async_copy(windows.at[array, place], there, back)

    def each(act):
        def one(place, _):
            row = pl.program_id(0) * rows + place

            @pl.when((row < batch) & touches(jnp.minimum(row, batch - 1)))
            def _():
                for array in range(arrays):
                    act(array, place, row)

        jax.lax.fori_loop(0, rows, one, None)

    def read(*at):
        fetch(*at).start()
        load(*at).start()

    def lay(array, place, row):
        fetch(array, place, row).wait()
        load(array, place, row).wait()
        laid[...] = windows[array, place].astype(jnp.float32)  # slots of narrower types share words
        fresh[...] = blocks[array, place].astype(jnp.float32)
        offset = dst[row] - first(row)

        def put(m, _):
            @pl.when((offset + m >= 0) & (offset + m < size))
            def _():
                laid[:, pl.ds(offset + m, 1), :] = fresh[:, pl.ds(src[row, m], 1), :]

        jax.lax.fori_loop(*part(row), put, None)
        windows[array, place] = laid[...].astype(windows.dtype)
        store(array, place, row).start()

    each(read)
    each(lay)
    each(lambda *at: store(*at).wait())
