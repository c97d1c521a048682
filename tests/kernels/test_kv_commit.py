"""The cache write against one slot at a time."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from specjax.kernels.kv_commit import kv_commit, lowered
from specjax.kernels.kv_commit.reference import commit
from specjax.kernels.kv_commit.xla import laid_over
from specjax.models.kv import KVCache, KVDelta, commit_kv
from specjax.plan import hlo
from specjax.sharding import make_mesh

B, K, S, H, T = 3, 2, 64, 128, 5
write = jax.jit(kv_commit, static_argnames=("implementation", "positions"))
EVERY = ["xla", "pallas_tpu_interpreted"]


def world(dtype=jnp.float32, capacity=S, arrays=2, seed=0, width=H, block=T):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 50, dtype)
    return [draw(B, K, capacity, width) for _ in range(arrays)], [draw(B, block, K, width) for _ in range(arrays)]


def same(caches, news, src, dst, **options):
    before = [np.array(x) for x in caches]
    for cache, new, got in zip(before, news, write(caches, news, src, dst, **options), strict=True):
        assert got.dtype == cache.dtype
        np.testing.assert_array_equal(np.asarray(got), commit(cache, new, src, dst))


SRC = {
    "all": None,
    "path": jnp.asarray([[0, 2, 4], [0, 1, 3], [0, 0, 0]], jnp.int32),
    "outside": jnp.asarray([[0, 9, 2], [-1, 1, 4], [3, 2, -7]], jnp.int32),
}
RUNS = {"ragged": (0, 13, 40), "across tiles": (6, 15, 31), "at the end": (59, 61, 60), "outside": (64, 200, -4)}


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("start", RUNS.values(), ids=RUNS)
def test_runs(start, implementation):
    for name, src in SRC.items():
        if implementation == "xla" or name != "outside" or start == RUNS["ragged"]:
            same(*world(), src, jnp.asarray(start, jnp.int32), implementation=implementation)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("implementation", EVERY)
def test_types(dtype, implementation):
    same(*world(dtype), SRC["path"], jnp.asarray([7, 30, 61], jnp.int32), implementation=implementation)


@pytest.mark.parametrize(
    ("width", "block", "dtype"),
    [
        (32, T, jnp.int8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((96, 140, jnp.float32), (64, T, jnp.bfloat16))),
    ],
)
def test_slots_side_by_side(width, block, dtype):
    """As a TPU keeps narrow heads: runs in one tile of slots, across two or three, at the end, and moved back."""
    caches, news = world(dtype, 256, width=width, block=block)
    for start in ((0, 126, 253), (-4, 300, 127)):
        for src in (None, SRC["outside"]):
            same(caches, news, src, jnp.asarray(start, jnp.int32), implementation="pallas_tpu_interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", (None, "context=2,model=2"))
def test_rings_of_slots_side_by_side(mesh):
    """Round the end, and from one device to the next."""
    caches, news = world(capacity=256, width=32)
    for start in ((253, 510, 126), (1020, -3, 381)):
        at = jnp.asarray(start, jnp.int32)
        wanted = write(caches, news, SRC["path"], at, positions=1024, implementation="xla")
        with jax.set_mesh(make_mesh(mesh, jax.devices()[:4])) if mesh else contextlib.nullcontext():
            written = write(caches, news, SRC["path"], at, positions=1024, implementation="pallas_tpu_interpreted")
            for got, want in zip(written, wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("src", [None, jnp.tile(jnp.arange(T)[None, ::-1], (B, 1))], ids=["all", "reversed"])
def test_named_slots(src):
    """Out of range drops, negative counts from the end."""
    dst = jnp.asarray([[5, 64, 3, 63, 0], [64, 99, 200, 64, 65], [1, -1, -65, 2, -2]], jnp.int32)
    same(*world(), src, dst)


@pytest.mark.parametrize("capacity", (64, 16), ids=("shards", "shards shorter than a run"))
def test_split_slots(capacity):
    """Every device writes its own slots: runs within one and across several, named slots, what lies outside."""
    mesh = make_mesh("context=4,model=2")
    cache, everywhere = (NamedSharding(mesh, jax.P(*spec)) for spec in ((None, "model", "context"), ()))

    def check(src, dst):
        caches, news = world(capacity=capacity)
        wanted = [commit(old, new, src, dst) for old, new in zip(map(np.array, caches), news, strict=True)]
        given = jax.device_put(caches, cache), *jax.device_put((news, src, dst), everywhere)
        with jax.set_mesh(mesh):
            program = write.lower(*given).compile()
        for got, want in zip(program(*given), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)
            assert got.sharding == cache
        return program.as_text()

    for start in ((0, capacity // 4 - 2, capacity - 1), (capacity + 9, -4, capacity // 2)):
        for src in SRC.values():
            check(src, jnp.asarray(start, jnp.int32))
    last = capacity - 1
    named = [[5, capacity, 3, last, 0], [capacity] * 5, [1, -1, -1 - capacity, 2, -2]]
    text = check(None, jnp.asarray(named, jnp.int32))
    assert not any(f" {kind}" in text for kind in hlo.COLLECTIVES)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ("context=4,model=2", "data=3,model=2"))
def test_the_kernel_on_a_mesh(mesh):
    """Every device by itself, a run across two of them too."""
    caches, news = world(capacity=4 * 16)
    for start, src in (((0, 14, 63), None), ((70, -4, 30), SRC["outside"])):
        at = jnp.asarray(start, jnp.int32)
        wanted = [commit(old, new, src, at) for old, new in zip(caches, news, strict=True)]
        with jax.set_mesh(make_mesh(mesh, jax.devices()[: 8 if "context" in mesh else 6])):
            written = write(caches, news, src, at, implementation="pallas_tpu_interpreted")
        for got, want in zip(written, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("mesh", (None, "context=2,model=2"))
def test_rings(mesh):
    """Runs that go round the end, lie beyond all positions or before them; kernel and XLA, against a slot at a time."""
    caches, news = world()
    for start in ((62, 126, 10), (253, 255, -3)):
        at = np.asarray(start)[:, None] + np.arange(3)
        slots = jnp.asarray(np.where((at >= 0) & (at < 256), at % S, S))
        wanted = [commit(old, new, SRC["path"], slots) for old, new in zip(caches, news, strict=True)]
        with jax.set_mesh(make_mesh(mesh, jax.devices()[:4])) if mesh else contextlib.nullcontext():
            for implementation in EVERY:
                at = jnp.asarray(start, jnp.int32)
                written = write(caches, news, SRC["path"], at, positions=256, implementation=implementation)
                for got, want in zip(written, wanted, strict=True):
                    np.testing.assert_array_equal(np.asarray(got), want)


def test_runs_of_single_numbers():
    """Laid over, as a TPU does."""
    rng = np.random.default_rng(0)
    for shape in ((B, S), (B, K, S)):
        rows, new = rng.normal(size=shape), rng.normal(size=(*shape[:-1], T))
        for start in ((0, 13, 40), (59, 61, 200)):
            want = rows.copy()
            for row, first in enumerate(start):
                first = min(first, S - T)
                want[row, ..., first : first + T] = new[row]
            got = laid_over(jnp.asarray(rows), jnp.asarray(new), jnp.asarray(start))
            np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", (None, "context=2,model=2"))
def test_what_a_tpu_writes(mesh, monkeypatch):
    """The choice as a program for TPUs makes it, the kernel interpreted: arrays of two shapes and types, and scales."""
    from specjax.kernels.kv_commit import tpu

    monkeypatch.setattr(tpu, "commit", functools.partial(tpu.commit, interpret=True))
    (key, _), (new, _) = world()
    caches = [key, (key[:, :, :32] * 2).astype(jnp.int8), key[..., 0], key * 3]
    news = [new, (new * 2).astype(jnp.int8), new[..., 1], new * 3]
    for src, dst, positions in (
        (SRC["path"], (0, -4, 60), None), (None, (59, 3, 30), None), (SRC["outside"], (30, 62, 94), 96),
    ):  # fmt: skip
        dst = jnp.asarray(dst, jnp.int32)
        wanted = write(caches, news, src, dst, positions=positions, implementation="xla")
        given, structure = jax.tree.flatten((tuple(caches), tuple(news), src, dst))
        with jax.set_mesh(make_mesh(mesh, jax.devices()[:4])) if mesh else contextlib.nullcontext():
            ambient = jax.sharding.get_abstract_mesh()
            run = lowered.served("tpu", 4 if mesh else 1, structure=structure, mesh=ambient, positions=positions)
            for got, want in zip(jax.jit(run)(*given), wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_derivatives_and_a_loop_in_shard_map():
    """Those of XLA's write; and the result of a device's write is one that differs from device to device."""
    caches, news = world()
    start = jnp.asarray([3, 9, 15], jnp.int32)
    of = lambda implementation: jax.grad(
        lambda caches, news: sum(
            (x**2).sum() for x in kv_commit(caches, news, SRC["path"], start, implementation=implementation)
        ),
        argnums=(0, 1),
    )(caches, news)
    for got, want in zip(*(jax.tree.leaves(of(implementation)) for implementation in (None, "xla")), strict=True):
        np.testing.assert_array_equal(got, want)

    def steps(cache, new):
        once = lambda i, cache: kv_commit([cache], [new], None, start + i)[0]
        return jax.lax.fori_loop(0, 2, once, cache)

    split = jax.shard_map(
        steps, mesh=make_mesh("model=2", jax.devices()[:2]), in_specs=(jax.P(None, "model"), jax.P(None, None, "model")),
        out_specs=jax.P(None, "model"),
    )  # fmt: skip
    np.testing.assert_array_equal(split(caches[0], news[0]), steps(caches[0], news[0]))


def test_no_kernel_is_in_a_program_for_a_cpu():
    """Nothing of it is traced, and vmap maps over the operation."""
    caches, news = world()
    start = jnp.asarray([3, 9, 15], jnp.int32)
    assert "tpu_custom_call" not in write.lower(caches, news, None, start).as_text()
    two = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x + 1]), tree)
    got = jax.vmap(lambda cache, new: kv_commit(cache, new, None, start))(two(caches), two(news))
    for i in range(2):
        for array, x in enumerate(write([x + i for x in caches], [x + i for x in news], None, start)):
            np.testing.assert_array_equal(got[array][i], x)


def test_split_slots_of_caches_of_several_capacities():
    """Each by its own, one that the mesh does not divide among them."""
    (cache, *_), (new, *_) = world()
    caches, news = [cache, cache[:, :, :32], cache[:, :, :30]], [new] * 3
    dst = jnp.asarray((-1, 40, 20), jnp.int32)
    wanted = write(caches, news, None, dst)
    with jax.set_mesh(make_mesh("context=8")):
        for got, want in zip(write(caches, news, None, dst), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_run_longer_than_the_cache():
    caches, news = world(capacity=4)
    with pytest.raises(ValueError, match="runs of 5 slots into a cache of 4"):
        kv_commit(caches, news, None, jnp.zeros((B,), jnp.int32))


@pytest.mark.parametrize("implementation", EVERY)
def test_poison_stays_where_it_is(implementation):
    """Rejected nodes and other slots may hold anything: none of it reaches a slot that it was not written to."""
    caches, news = world()
    for bad in (jnp.nan, jnp.inf):
        poisoned = [x.at[:, :, 20:].set(bad) for x in caches], [x.at[:, 3:].set(bad) for x in news]
        got = write(
            *poisoned, jnp.asarray([[0, 2], [1, 0], [2, 2]]), jnp.asarray([3, 9, 15]), implementation=implementation
        )
        for x in got:
            assert np.isfinite(np.asarray(x)[:, :, :20]).all() and not np.isfinite(np.asarray(x)[:, :, 20:]).any()


def test_rows_more_than_fit_at_a_time(monkeypatch):
    from specjax.kernels.kv_commit import tpu

    monkeypatch.setattr(tpu, "VMEM_BYTES", (2 * 2 + 1) * (16 + 8) * 2 * 128 * 4)  # two of three rows
    same(*world(), SRC["path"], jnp.asarray([1, 23, 44], jnp.int32), implementation="pallas_tpu_interpreted")


def test_a_cache_is_written_in_place():
    """The donated cache is the result's memory, and nothing of its size is made beside it."""
    caches, news = world(capacity=4096, arrays=4)
    cache, delta = (
        KVCache(*map(tuple, (caches[:2], caches[2:]))),
        KVDelta(*map(tuple, (news[:2], news[2:])), SRC["path"]),
    )
    named = jnp.asarray(np.random.default_rng(0).permutation(4096)[: B * 3].reshape(B, 3))
    for dst in (jnp.asarray([1, 2, 3]), named):
        compiled = jax.jit(commit_kv, donate_argnums=0).lower(cache, delta, SRC["path"], dst).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == sum(x.nbytes for x in caches)
        assert memory.temp_size_in_bytes < caches[0].nbytes / 4


def test_bad_input():
    caches, news = world()
    with pytest.raises(ValueError, match="no implementation 'triton'"):
        kv_commit(caches, news, None, jnp.zeros(B, int), implementation="triton")
    with pytest.raises(ValueError, match="scattered slots are XLA's"):
        kv_commit(caches, news, None, jnp.zeros((B, T), int), implementation="pallas")
    caches, news = world(capacity=60)
    with pytest.raises(ValueError, match="whole tiles of 8 slots"):
        kv_commit(caches, news, None, jnp.zeros(B, int), implementation="pallas")
    with pytest.raises(ValueError, match="one shape and type"):
        kv_commit([caches[0][:, :, :56], world()[0][0]], news, None, jnp.zeros(B, int), implementation="pallas")
    caches, news = world()
    with pytest.raises(ValueError, match="heads of 64 are no multiple of 128"):
        kv_commit(
            [x[..., :64] for x in caches], [x[..., :64] for x in news], None, jnp.zeros(B, int), implementation="pallas"
        )
    with pytest.raises(ValueError, match="more than the 16 MiB"):
        long = (
            [jax.ShapeDtypeStruct((B, K, 2**15, H), jnp.float32)],
            [jax.ShapeDtypeStruct((B, 2**14, K, H), jnp.float32)],
        )
        jax.eval_shape(lambda *x: kv_commit(*x, None, jnp.zeros(B, int), implementation="pallas"), *long)
