"""The TPU kernel of tree attention over several blocks of a row: what it reads, in which steps, and how the cache is cut."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from support.attention import B, H, K, T, holes, quantised, ring, sinks, world
from support.conformance import but_slow

from specjax.kernels.tree_attention import blocks, tpu, tree_attention
from specjax.kernels.tree_attention.blocks import Tiles
from specjax.kernels.tree_attention.reference import reference

CHIPS = {"v5e": ("TPU v5 lite", 1), "v5p": ("TPU v5", 2), "v6e": ("TPU v6 lite", 1)}


@pytest.fixture
def cut_by(monkeypatch):
    """The kernel in its interpreter with given tiles, as a function of operands and options that are arrays."""

    def made(tiles, **settings):
        monkeypatch.setattr(blocks, "tiles", lambda operands, window: tiles)
        way = functools.partial(tree_attention, implementation="pallas_tpu_interpreted", **settings)
        return jax.jit(lambda operands, options: way(*operands, **options, scale=operands[0].shape[-1] ** -0.5))

    return made


def check(attend, operands, options, **settings):
    got = attend(operands, options)
    want = reference(*operands, **options, **settings, scale=operands[0].shape[-1] ** -0.5)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=1e-5)
    return got


ONE, EACH, PARTS = Tiles(128, 2), Tiles(128, 1), Tiles(128, 1, 3)
"""All heads in one step, each in its own, and each row in a list of its own."""
NARROW, WIDE = H, 128
"""A TPU keeps caches of narrow heads with their slots side by side."""
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
cuts = pytest.mark.parametrize(
    ("tiles", "width"),
    [(ONE, WIDE), (PARTS, NARROW), slow(ONE, NARROW), slow(EACH, NARROW), slow(PARTS, WIDE)],
    ids=str,
)


@cuts
def test_rows_of_no_some_and_all_blocks(cut_by, tiles, width):
    """The last block reads past the cache; a row without a prefix; a query that sees nothing."""
    operands, options = world(300, (0, 129, 300), width=width)
    options["visible"] = options["visible"].at[0, 2].set(False)
    got = check(cut_by(tiles), operands, options)
    assert (got[0, 2] == 0).all()


@cuts
def test_blocks_before_a_window_holes_and_a_cap(cut_by, tiles, width):
    operands, options = world(512, (512, 5, 131), past=61, group=1, width=width)
    settings = {"window": 100, "soft_cap": 2.0}
    check(cut_by(tiles, **settings), operands, options | {"unseen": holes(512)}, **settings)


@cuts
def test_a_ring_of_several_blocks(cut_by, tiles, width):
    texts = (40, 300, 1000)
    operands, options = world(300, np.minimum(texts, 300), past=3, width=width)
    positions = jnp.asarray(texts)[:, None] + jnp.arange(T + 3)[None]
    options |= {"query_positions": positions[:, 3:], "key_positions": positions, "cache_positions": ring(300, texts)}
    check(cut_by(tiles, window=200), operands, options | {"sinks": sinks()}, window=200)


@pytest.mark.parametrize(
    ("dtype", "width"), [(jnp.int8, WIDE), slow(jnp.int8, NARROW), slow(jnp.float8_e4m3fn, NARROW)]
)
def test_a_block_is_computed_in_pieces(cut_by, monkeypatch, dtype, width):
    """Scales, holes and positions are cut as the slots are; two pieces to a block, and two blocks."""
    monkeypatch.setattr(blocks, "COMPUTED", 128)
    (*new, cache_key, cache_value, length), options = world(500, (500, 140, 260), block=2, heads=1, width=width)
    bounded = (jnp.clip(x, -1e9, 1e9) for x in (cache_key, cache_value))
    (cache_key, key_scale), (cache_value, value_scale) = (quantised(x, dtype) for x in bounded)
    options |= {"key_scale": key_scale, "value_scale": value_scale, "unseen": holes(500)}
    options |= {"cache_positions": jnp.broadcast_to(jnp.arange(500, dtype=jnp.int32), (B, 500))}
    check(cut_by(Tiles(256, 1), window=400), (*new, cache_key, cache_value, length), options, window=400)


def seen_blocks(length, positions, window, size):
    """Of a row, by trying every slot."""
    near = lambda slot: window is None or any(at - slot < window for at in positions)
    return {slot // size for slot in range(length) if near(slot)}


@pytest.mark.parametrize("window", but_slow([None, 100], None))
def test_the_grid_has_a_step_for_every_live_block(cut_by, monkeypatch, window):
    """And one for a row that has none; whatever the longest row has."""
    grids = []

    def watched(*args, grid_spec, **settings):
        jax.debug.callback(lambda steps: grids.append((*grid_spec.grid[:2], int(steps))), grid_spec.grid[2])
        return call(*args, grid_spec=grid_spec, **settings)

    call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", watched)
    attend = cut_by(EACH, window=window)
    for lengths in ((0, 129, 512), (512, 512, 512), (1, 2, 3), (0, 0, 0)):
        operands, options = world(512, lengths)
        jax.block_until_ready(attend(operands, options))
        jax.effects_barrier()
        at = np.asarray(options["query_positions"])
        each = [max(1, len(seen_blocks(lengths[b], at[b], window, 128))) for b in range(B)]
        assert grids.pop() == (1, K, sum(each)) and not grids


@pytest.mark.parametrize("parts", [1, 2])
def test_the_list_of_steps_names_every_block_once(parts):
    counts = np.asarray([1, 4, 2, 1, 1, 3])
    start, row_of, steps = (np.asarray(x) for x in tpu.schedule(jnp.asarray(counts), parts, 4))
    found = []
    for part in range(parts):
        for step in range(steps):
            row = row_of.reshape(parts, -1)[part, step]
            if step - start[row] < counts[row]:  # else it is behind the end of a shorter list
                found.append((row, step - start[row]))
    assert found == [(row, block) for row, count in enumerate(counts) for block in range(count)]
    assert steps == max(half.sum() for half in counts.reshape(parts, -1))


def on(chip, heads=8, queries=64, capacity=8192, batch=8, dtype=jnp.bfloat16, window=None, width=128):
    """What a chip is given."""
    kind, cores = CHIPS[chip]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="tpu")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    cache, own = of(dtype, batch, heads, capacity, width), of(dtype, batch, heads, 16, width)
    scale = None if dtype == jnp.bfloat16 else of(jnp.float32, batch, heads, capacity)
    operands = tpu.Operands(
        of(jnp.bfloat16, batch, heads, queries, width), own, own, cache, cache, of(jnp.int32, batch),
        key_scale=scale, value_scale=scale,
    )  # fmt: skip
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return blocks.tiles(operands, window), blocks.used(operands, blocks.tiles(operands, window))


@pytest.mark.parametrize("chip", CHIPS)
def test_tiles_fit_the_chip_and_the_heads(chip):
    for heads in (1, 2, 8):
        for queries in (4, 64, 1024):
            for capacity in (128, 2000, 8192, 131072):
                for dtype in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
                    for width in (64, 128, 256):
                        tiles, used = on(chip, heads, queries, capacity, dtype=dtype, width=width)
                        assert heads % tiles.heads == 0 and used <= blocks.VMEM[chip]
                        assert tiles.slots <= capacity and tiles.slots % blocks.chunk(tiles.slots) == 0
                        assert tiles.slots % 128 == 0 or tiles.slots == capacity


def test_all_heads_of_a_core_are_read_at_once_where_they_fit():
    assert on("v5e")[0].heads == on("v6e")[0].heads == 8
    assert on("v5p")[0] == Tiles(on("v5p")[0].slots, 4)  # each of two cores has half of them
    assert on("v5p", heads=1)[0].parts == 2 and on("v5p", heads=1, batch=3)[0].parts == 1  # or half of the rows
    assert on("v5e", queries=1024)[0].heads < 8


def test_a_window_and_fewer_bytes_choose_other_blocks():
    assert on("v6e", heads=1, window=128)[0].slots < on("v6e", heads=1)[0].slots
    assert on("v5e", heads=2, dtype=jnp.int8)[0].slots > on("v5e", heads=2)[0].slots


@pytest.mark.parametrize("capacity", (1, 100, 300, 640, 1000, 1025, 2000, 4096, 5000, 8200, 33000))
def test_cuts_leave_little_behind_the_end(capacity):
    for slots in blocks.SIZES:
        size = blocks.cut(capacity, slots)
        assert size <= min(slots, capacity) and (size % 128 == 0 or size == capacity)
        assert math.ceil(capacity / size) <= math.ceil(capacity / slots) * 2
        assert size % blocks.chunk(size) == 0 and blocks.chunk(size) <= blocks.COMPUTED
