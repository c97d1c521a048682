"""The cache write as one Mosaic kernel for all arrays that it is given.

A cache's slots lie in tiles, which are the least that can be moved. So the tiles that a run touches are read, the run is laid
over them, and they are written back to where they came from. The reads of several rows are under way at a time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

VMEM_BYTES = 2**22
"""What rows may hold at a time, over all arrays."""
INTERPRETER = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


def tile(dtype) -> int:
    """Cache slots in a tile of a type."""
    return 32 // jnp.dtype(dtype).itemsize


def commit(caches, news, src, dst, *, interpret=False):
    """See `api.kv_commit`; for runs, and capacities of whole tiles."""
    batch, heads, capacity, width = caches[0].shape
    block = news[0].shape[1]
    dtype = caches[0].dtype
    count = block if src is None else src.shape[1]
    slots = tile(dtype)
    window = -(-(count + slots - 1) // slots) * slots
    if dst.ndim != 1:
        raise ValueError(
            "the TPU kernel of kv_commit writes runs (dst [B]); scattered slots are XLA's: choose 'xla' or None"
        )
    if capacity % slots or window > capacity:
        raise ValueError(
            f"the TPU kernel of kv_commit needs a capacity of whole tiles of {slots} slots, at least {window}, not {capacity}: "
            "choose 'xla' or None"
        )
    if any(x.shape != caches[0].shape or x.dtype != dtype for x in caches):
        raise ValueError("the TPU kernel of kv_commit takes caches of one shape and type in a call")
    if src is None:
        src = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32)[None], (batch, block))
    src = jnp.clip(jnp.where(src < 0, src + block, src), 0, block - 1)
    dst = jnp.clip(jnp.where(dst < 0, dst + capacity, dst), 0, capacity - count)

    arrays = len(caches)
    need = arrays * (window + block) * heads * max(width, 128) * jnp.dtype(dtype).itemsize
    rows = max(min(VMEM_BYTES // need, batch), 1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, arrays=arrays, rows=rows),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(-(-batch // rows),),
            in_specs=[anywhere] * (2 * arrays),
            out_specs=(anywhere,) * arrays,
            scratch_shapes=[
                pltpu.VMEM((arrays, rows, heads, window, width), dtype),
                pltpu.VMEM((arrays, rows, block, heads, width), dtype),
                pltpu.VMEM((heads, window, width), jnp.float32),
                pltpu.SemaphoreType.DMA((3, arrays, rows)),
            ],
        ),
        input_output_aliases={2 + arrays + i: i for i in range(arrays)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=INTERPRETER if interpret else False,
        name="kv_commit",
    )(src, dst, *(x.astype(dtype) for x in news), *caches)


def _kernel(src, dst, *refs, arrays, rows):
    news, caches = refs[:arrays], refs[2 * arrays : 3 * arrays]  # the outputs, which alias the caches
    windows, blocks, laid, semaphores = refs[3 * arrays :]
    batch, capacity = caches[0].shape[0], caches[0].shape[2]
    heads, window = windows.shape[2:4]
    slots = tile(windows.dtype)

    def first(row):
        """The first slot of a row's window: of a tile, and so that the window ends inside the cache."""
        return pl.multiple_of(jnp.minimum(jax.lax.div(dst[row], slots), (capacity - window) // slots) * slots, slots)

    def fetch(array, place, row):
        return pltpu.make_async_copy(news[array].at[row], blocks.at[array, place], semaphores.at[0, array, place])

    def load(array, place, row):
        there = caches[array].at[row, :, pl.ds(first(row), window)]
        return pltpu.make_async_copy(there, windows.at[array, place], semaphores.at[1, array, place])

    def store(array, place, row):
        there = caches[array].at[row, :, pl.ds(first(row), window)]
        return pltpu.make_async_copy(windows.at[array, place], there, semaphores.at[2, array, place])

    def each(act):
        def one(place, _):
            row = pl.program_id(0) * rows + place

            @pl.when(row < batch)
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
        offset = dst[row] - first(row)

        def put(m, _):
            node = blocks[array, place, src[row, m]].astype(jnp.float32)
            for head in range(heads):
                laid[head, pl.ds(offset + m, 1), :] = node[head : head + 1]

        jax.lax.fori_loop(0, src.shape[1], put, None)
        windows[array, place] = laid[...].astype(windows.dtype)
        store(array, place, row).start()

    each(read)
    each(lay)
    each(lambda *at: store(*at).wait())
