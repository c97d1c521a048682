"""The cache write as one Mosaic kernel, for caches that a TPU stores with a channel's slots adjacent
(`layouts.slots_last`).

A tile holds 128 slots. The tiles that a run touches, mostly one, are read; the run is transposed and laid over them,
and they are written back. Heads and channels are one axis here, so that narrow heads are transposed together.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128


def refusal(shape, dtype) -> str | None:
    """The reason why the kernel cannot write caches of this type, with `shape` `[B, K, S, H]` on a device; None if it
    can."""
    packed = 32 // jnp.dtype(dtype).itemsize
    if shape[2] % LANES or shape[3] % packed:
        return f"heads of {shape[3]} channels need a multiple of {packed} and a capacity of whole {LANES} slots, not {shape[2]}"
    return None


def tiles(count: int) -> int:
    """The most tiles that a run of `count` slots may touch."""
    return (count + 2 * (LANES - 1)) // LANES


def sizes(shape, block: int, count: int, arrays: int, dtype) -> tuple[int, int]:
    """The bytes in VMEM that all rows share, and that each row takes.

    Args:
      shape: of a device's part of a cache, `[B, K, S, H]`.
      block: slots of the new values.
      count: slots of a run.
      arrays: the number of caches.
      dtype: the caches' type.
    """
    channels = -(-shape[1] * shape[3] // LANES) * LANES
    block = -(-block // 32) * 32
    each = tiles(count) * LANES + block
    return 4 * channels * (2 * LANES + block), arrays * channels * each * jnp.dtype(dtype).itemsize


def moved(shape, block: int, count: int, arrays: int, dtype) -> int:
    """The bytes that a call reads and writes: a run of M slots touches 1 + (M - 1) / 128 tiles on average."""
    batch, heads, _, width = shape
    return arrays * batch * heads * width * (2 * (LANES + count - 1) + block) * jnp.dtype(dtype).itemsize


def commit(caches, news, src, dst, span, rows, **call):
    """See `tpu.commit`; `rows` rows at a time."""
    batch, heads, slots, width = caches[0].shape
    arrays, dtype, channels, block = len(caches), caches[0].dtype, heads * width, news[0].shape[1]
    lanes, count = -(-channels // LANES) * LANES, tiles(src.shape[1])
    turned = [x.swapaxes(2, 3).reshape(batch, channels, slots) for x in caches]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        functools.partial(_kernel, arrays=arrays, rows=rows),
        out_shape=tuple(pltpu.HBM(x.shape, x.dtype) for x in turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(-(-batch // rows),),
            in_specs=[anywhere] * (2 * arrays),
            out_specs=(anywhere,) * arrays,
            scratch_shapes=[
                pltpu.VMEM((arrays, rows, count, channels, LANES), dtype),
                pltpu.VMEM((arrays, rows, block, channels), dtype),
                pltpu.VMEM((LANES, lanes), jnp.float32),
                pltpu.VMEM((block, channels), jnp.float32),
                pltpu.SemaphoreType.DMA((arrays, rows)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={3 + arrays + i: i for i in range(arrays)},
        **call,
    )(src, dst, span, *(x.astype(dtype).reshape(batch, block, channels) for x in news), *turned)
    return [x.reshape(batch, heads, width, slots).swapaxes(2, 3) for x in written]


def _kernel(src, dst, span, *refs, arrays, rows):
    news, caches = refs[:arrays], refs[2 * arrays : 3 * arrays]  # the outputs, which alias the caches
    # the last two are semaphores: for reads by array and row, and for all writes
    windows, blocks, laid, fresh, here, back = refs[3 * arrays :]
    batch, channels, slots = caches[0].shape
    count = windows.shape[2]

    def run(row):
        """The slots at which a row's run begins and before which it ends; some may be outside the cache."""
        low, high = jnp.maximum(span[row, 0], 0), jnp.minimum(span[row, 1], src.shape[1])
        return dst[row] + low, dst[row] + high

    def begin(row, tile):
        return (jax.lax.shift_right_arithmetic(dst[row], jnp.int32(7)) + tile) * LANES

    def touches(row, tile):
        (low, high), at = run(row), begin(row, tile)
        return (low < high) & (at >= 0) & (at < slots) & (low < at + LANES) & (high > at)

    def fetch(array, place, row):
        return pltpu.make_async_copy(news[array].at[row], blocks.at[array, place], here.at[array, place])

    def there(array, row, tile):
        return caches[array].at[row, :, pl.ds(pl.multiple_of(begin(row, tile), LANES), LANES)]

    def load(array, place, row, tile):
        return pltpu.make_async_copy(there(array, row, tile), windows.at[array, place, tile], here.at[array, place])

    def store(array, place, row, tile):
        return pltpu.make_async_copy(windows.at[array, place, tile], there(array, row, tile), back)

    def touched(row, act):
        """Does something for every tile that a row's run touches."""
        for tile in range(count):
            pl.when(touches(row, tile))(functools.partial(act, tile))

    def each(act):
        def one(place, _):
            row = pl.program_id(0) * rows + place
            low, high = run(jnp.minimum(row, batch - 1))

            @pl.when((row < batch) & (low < high))
            def _():
                for array in range(arrays):
                    act(array, place, row)

        jax.lax.fori_loop(0, rows, one, None)

    def read(array, place, row):
        fetch(array, place, row).start()
        touched(row, lambda tile: load(array, place, row, tile).start())

    def lay(array, place, row):
        fetch(array, place, row).wait()
        touched(row, lambda tile: load(array, place, row, tile).wait())
        fresh[...] = blocks[array, place].astype(jnp.float32)  # slots of narrower types share words
        low, high = run(row)

        @functools.partial(touched, row)
        def _(tile):
            first = begin(row, tile)

            def put(at, _):
                laid[pl.ds(at - first, 1), :channels] = fresh[pl.ds(src[row, at - dst[row]], 1), :]

            jax.lax.fori_loop(jnp.maximum(low, first), jnp.minimum(high, first + LANES), put, None)
            at = first + jax.lax.broadcasted_iota(jnp.int32, (channels, LANES), 1)
            old = windows[array, place, tile]
            new = jnp.where((at >= low) & (at < high), laid[...].T[:channels], old.astype(jnp.float32))
            windows[array, place, tile] = new.astype(windows.dtype)
            store(array, place, row, tile).start()

    each(read)
    each(lay)
    each(lambda array, place, row: touched(row, lambda tile: store(array, place, row, tile).wait()))
