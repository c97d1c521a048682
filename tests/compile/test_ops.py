"""The cache write and the Gumbel argmax, compiled for TPUs at Llama-3-8B's sizes: they compile, and what they need."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from specjax.kernels.kv_commit import kv_commit
from specjax.kernels.verify import gumbel_argmax
from specjax.sharding.aot import compiled, devices

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, TPUs' compiler: pip install 'specjax[aot]'"
)
B, K, S, H, V = 4, 8, 32768, 128, 128256
CHIPS = ["v5e:2x2", pytest.param("v5p:2x2x1", marks=pytest.mark.slow), pytest.param("v6e:2x2", marks=pytest.mark.slow)]
NODES = [(1, 1), (16, 5), (64, 9)]  # nodes, and how many of them a path holds
CACHE = B * K * S * H * 2


def program_of(function, arguments, **options):
    return compiled(jax.jit(function, **options).lower(*arguments))


def write(topology, nodes, path, implementation, named=False):
    """The program that writes the keys and values of two layers."""
    place = SingleDeviceSharding(devices(topology)[0])
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    arguments = (
        [of((B, K, S, H), jnp.bfloat16)] * 4, [of((B, nodes, K, H), jnp.bfloat16)] * 4, of((B, path), jnp.int32),
        of((B, path) if named else (B,), jnp.int32),
    )  # fmt: skip
    return program_of(lambda *x: kv_commit(*x, implementation=implementation), arguments, donate_argnums=0)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("topology", CHIPS)
def test_commit_touches_what_it_writes(topology, implementation):
    for nodes, path in NODES:
        program = write(topology, nodes, path, implementation)
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == 4 * CACHE
        assert memory.temp_size_in_bytes < CACHE / 100
        if implementation == "xla":
            assert program.cost_analysis()["bytes accessed"] < CACHE / 10
        else:
            assert "tpu_custom_call" in program.as_text()


def test_named_slots_are_written_in_place():
    memory = write("v5e:2x2", 64, 64, None, named=True).memory_analysis()
    assert memory.alias_size_in_bytes == 4 * CACHE and memory.temp_size_in_bytes < CACHE / 100


def test_a_sharded_cache_is_written_where_it_lies():
    mesh = Mesh(np.array(devices("v5e:2x2")).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    of = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    for shape, spec in (((B,), ("data",)), ((B, 5), ("data",))):
        program = program_of(
            kv_commit,
            ([of((B, K, S, H), jnp.bfloat16, "data", "model")] * 2,
             [of((B, 16, K, H), jnp.bfloat16, "data", None, "model")] * 2,
             of((B, 5), jnp.int32, "data"), of(shape, jnp.int32, *spec)), donate_argnums=0,
        )  # fmt: skip
        text, memory = program.as_text(), program.memory_analysis()
        assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))
        assert memory.alias_size_in_bytes == CACHE / 2 and memory.temp_size_in_bytes < CACHE / 100


def argmax(topology, nodes, count, implementation, columns=False):
    place = SingleDeviceSharding(devices(topology)[0])
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def run(scores, words, which, noisy, columns):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        return gumbel_argmax(scores, keys, which, noisy, columns=columns, implementation=implementation)

    return program_of(run, (
        of((B, nodes, V), jnp.float32), of((B, count, 2), jnp.uint32), of((B, nodes), jnp.int32), of((B,), jnp.bool),
        of((V,), jnp.int32) if columns else None,
    ))  # fmt: skip


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("topology", CHIPS)
def test_argmax_makes_no_noise_of_the_scores_size(topology, implementation):
    fallback = implementation == "xla" and topology != "v5e:2x2"  # one shape does: XLA takes long over it
    for nodes, count in NODES[1:2] if fallback else (*NODES, (16, 16)):
        scores = B * nodes * V * 4
        program = argmax(topology, nodes, count, implementation)
        room = 2**20 if implementation == "pallas" else scores + 2**24  # XLA may lay the scores out anew
        assert program.memory_analysis().temp_size_in_bytes < room
        assert ("tpu_custom_call" in program.as_text()) == (implementation == "pallas")


def test_argmax_over_a_part_of_the_vocabulary():
    assert "tpu_custom_call" in argmax("v5e:2x2", 16, 5, "pallas", columns=True).as_text()


def test_argmax_of_a_sharded_vocabulary_moves_no_scores():
    mesh = Mesh(np.array(devices("v5e:2x2")).reshape(1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    of = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    run = lambda scores, words, *rest: gumbel_argmax(
        scores, jax.random.wrap_key_data(words, impl="threefry2x32"), *rest
    )
    program = program_of(run, (
        of((B, 16, V), jnp.float32, None, None, "model"), of((B, 5, 2), jnp.uint32), of((B, 16), jnp.int32),
        of((B,), jnp.bool),
    ))  # fmt: skip
    assert not any(word in program.as_text() for word in ("all-gather", "all-to-all", "collective-permute"))
    assert program.memory_analysis().temp_size_in_bytes < B * 16 * V * 4 / 4 + 2**24
