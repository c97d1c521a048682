"""Every kernel at real shapes goes through the real compilers of TPUs and of an H100, on a machine without either."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support.conformance import but_slow
from support.planned import skip_without_compiler

from experiments.costs import attention_blocks
from specjax.kernels.tree_attention import blocks, tree_attention
from specjax.plan.hlo import traffic
from specjax.sharding.aot import compiled, devices

MODELS = {"llama-3-8b": (32, 8, 128), "llama-3-70b": (64, 8, 128)}
"""Query heads, kv-heads and their width; Qwen3-32B has those of Llama-3-70B."""
TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def layer_on(
    topology, model, slots, capacity, *, split=(1, 1, 1), batch=4, past=0, options=None, dtype=None, holes=False,
    sinks=False, ring=False, implementation="pallas",
):  # fmt: skip
    """One layer's attention, compiled for the first devices of a topology: rows over `data`, heads over `model`, cache slots
    over `context`."""
    skip_without_compiler(topology)
    chips = np.array(devices(topology)[: math.prod(split)]).reshape(split)
    mesh = Mesh(chips, ("data", "model", "context"), axis_types=(AxisType.Auto,) * 3)

    def given(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("data", *spec)))

    heads, kv_heads, width = MODELS[model]
    new = given((batch, past + slots, kv_heads, width), jnp.bfloat16, None, "model")
    cache = given((batch, kv_heads, capacity, width), dtype or jnp.bfloat16, "model", "context")
    positions = [given((batch, size), jnp.int32) for size in (slots, past + slots)]
    scales = [None if dtype is None else given((batch, kv_heads, capacity), jnp.float32, "model", "context")] * 2
    arrays = (
        given((batch, slots, heads, width), jnp.bfloat16, None, "model"), new, new, cache, cache,
        given((batch,), jnp.int32), given((batch, slots, past + slots), bool), *positions,
        given((batch, capacity), bool, "context") if holes else None, *scales,
        jax.ShapeDtypeStruct((heads,), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("model"))) if sinks else None,
        given((batch, capacity), jnp.int32, "context") if ring else None,
    )  # fmt: skip

    def layer(*arrays):
        names = (
            "visible", "query_positions", "key_positions", "unseen", "key_scale", "value_scale", "sinks", "cache_positions",
        )  # fmt: skip
        given = dict(zip(names, arrays[6:], strict=True))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return tree_attention(
                *arrays[:6], **given, scale=width**-0.5, implementation=implementation, **(options or {})
            )

    program = compiled(jax.jit(layer).lower(*arrays))
    assert "custom-call" in program.as_text() or "custom_call" in program.as_text()
    return program


def gathers(program):
    return [line for line in program.as_text().splitlines() if " all-gather" in line or " all-to-all" in line]


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:8"])
def test_verification_compiles(topology):
    layer_on(topology, "llama-3-8b", 16, 2048)


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:8"])
def test_heads_over_four_chips_gather_nothing(topology):
    program = layer_on(topology, "llama-3-8b", 16, 8192, split=(1, 4, 1))
    assert gathers(program) == []
    # a chip holds a quarter of the cache, and of what it needs beside its arguments nothing is as large as that
    quarter = 4 * 2 * 8192 * 128 * 2
    used = program.memory_analysis()
    assert 2 * quarter < used.argument_size_in_bytes < 2.2 * quarter
    assert used.temp_size_in_bytes < quarter


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:8"])
def test_slots_over_four_chips_gather_nothing(topology):
    """What they exchange is as long as the block's queries."""
    program = layer_on(topology, "llama-3-8b", 16, 8192, split=(1, 1, 4))
    moved = [a.moved for a in traffic(program.as_text()).accesses if a.moved]
    assert gathers(program) == [] and moved
    assert max(moved) <= 4 * 16 * 32 * (128 + 1) * 4


@pytest.mark.slow
@pytest.mark.parametrize("topology", [*TPUS, "h100:8"])
@pytest.mark.parametrize(
    ("model", "slots", "capacity"),
    [
        (model, slots, (2048, 32768)[(i + j) % 2])  # all pairs of the three
        for i, model in enumerate(MODELS)
        for j, slots in enumerate((1, 16, 64))
    ],
)
def test_every_shape_compiles(topology, model, slots, capacity):
    layer_on(topology, model, slots, capacity)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [*TPUS, "h100:8"])
@pytest.mark.parametrize(
    "settings",
    [
        {"options": {"window": 1024, "soft_cap": 50.0}, "capacity": 2000, "sinks": True, "ring": True},
        {"past": 64, "slots": 64, "holes": True},
        {"dtype": jnp.int8},
        {"dtype": jnp.float8_e4m3fn},
        {"split": (2, 2, 1)},
        {"split": (1, 2, 2), "options": {"window": 1024}, "holes": True, "sinks": True, "ring": True},
        {"split": (1, 1, 4), "dtype": jnp.int8},
    ],
    ids=[
        "window, cap, uneven, sinks, ring",
        "past and holes",
        "int8",
        "fp8",
        "rows and heads",
        "heads, slots, sinks, ring",
        "slots, int8",
    ],
)
def test_every_option_compiles(topology, settings):
    program = layer_on(topology, "llama-3-8b", **({"slots": 16, "capacity": 2048} | settings))
    assert gathers(program) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "settings"),
    [
        ("v5e:2x2", {"options": {"window": 1024, "soft_cap": 50.0}, "capacity": 2000, "sinks": True, "ring": True}),
        ("v5p:2x2x1", {"past": 64, "slots": 64, "holes": True}),
        ("v6e:2x2", {"dtype": jnp.int8, "capacity": 8192}),
        ("v5e:2x2", {"dtype": jnp.float8_e4m3fn, "capacity": 384}),
        ("v6e:2x2", {"split": (1, 2, 2), "options": {"window": 1024}, "holes": True, "sinks": True, "ring": True}),
        ("v5p:2x2x1", {"split": (1, 1, 4), "dtype": jnp.int8}),
    ],
)
def test_narrow_heads_are_read_where_they_lie(topology, settings, monkeypatch):
    """Heads of 64 channels lie on a TPU with their slots side by side; nothing lays them out anew."""
    monkeypatch.setitem(MODELS, "narrow", (64, 8, 64))
    settings = {"slots": 16, "capacity": 2048} | settings
    program = layer_on(topology, "narrow", **settings)
    rows, heads, slots = settings.get("split", (1, 1, 1))
    own = 4 // rows, 8 // heads, settings["capacity"] // slots
    moved = traffic(program.as_text())
    assert gathers(program) == [] and moved.written((*own, 64)) == moved.written((*own[:2], 64, own[2])) == []


@pytest.mark.parametrize("width", [80, 96])
def test_widths_that_are_no_power_of_two_compile_for_a_gpu(width, monkeypatch):
    monkeypatch.setitem(MODELS, "narrow", (32, 8, width))
    layer_on("h100:8", "narrow", 16, 2048)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "settings"),
    [
        (64, {"options": {"window": 1024, "soft_cap": 50.0}, "sinks": True, "ring": True, "holes": True, "past": 40}),
        (128, {"split": (1, 2, 2), "capacity": 8192}),
    ],
    ids=["all options", "heads, slots"],
)
def test_the_mosaic_kernel_for_hopper(width, settings, monkeypatch, capfd):
    """Products of warpgroups, copies by the tensor memory accelerator, and no register spilled, as Mosaic has ptxas say."""
    monkeypatch.setitem(MODELS, "any", (32, 8, width))
    for wanted in ("PTX", "PTXAS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{wanted}", "1")
    program = layer_on("h100:8", "any", 16, **{"capacity": 2048} | settings, implementation="mosaic_gpu")
    assert "mosaic_gpu_v2" in program.as_text() and gathers(program) == []
    said = capfd.readouterr().out
    assert "wgmma.mma_async" in said and "cp.async.bulk.tensor" in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said and "for 'sm_90a'" in said


@pytest.mark.parametrize("topology", but_slow(TPUS, "v5p:2x2x1", "v6e:2x2"))
@pytest.mark.parametrize(
    ("queries", "width"),
    [(64, 128), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((256, 128), (1024, 128), (256, 64)))],
)
def test_tiles_take_no_more_memory_than_is_counted(topology, queries, width):
    """The compiler's own figure, of eight kv-heads and the largest blocks of the table."""
    skip_without_compiler(topology)
    chip, operands = topology[:3], attention_blocks.operands_of(8, queries, 32768, width=width)
    tiles = blocks.fitted(operands, 8, blocks.SIZES[0] if queries > 64 else 1024, blocks.VMEM[chip])
    place = NamedSharding(Mesh(np.array(devices(topology)[:1]), ("x",)), PartitionSpec())
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), operands)
    text = compiled(jax.jit(lambda given: attention_blocks.attend(given, tiles)).lower(given)).as_text()
    (call,) = [line for line in text.splitlines() if "tpu_custom_call" in line]
    taken = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', call)
    cache = 2 * 2 * tiles.heads * tiles.slots * width * 2
    assert cache <= int(taken[1]) <= blocks.used(operands, tiles) <= blocks.VMEM[chip]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:8"])
def test_heads_as_wide_as_gemmas_compile(topology, monkeypatch):
    """Those of Gemma 4's full layers, more queries than a tile holds."""
    monkeypatch.setitem(MODELS, "gemma-4", (16, 2, 512))
    layer_on(topology, "gemma-4", 64, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TPUS)
def test_values_that_are_keys_compile(topology):
    """DeepSeek's 576 channels for all heads, in a cache that is read where it lies."""
    skip_without_compiler(topology)
    mesh = Mesh(np.array(devices(topology)[:1]), ("data",), axis_types=(AxisType.Auto,))
    given = lambda shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec())
    )

    def layer(query, key, cache_key, length, visible):
        options = {"visible": visible, "scale": 0.1, "implementation": "pallas"}
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return tree_attention(query, key, None, cache_key, None, length, **options)

    arrays = given((8, 16, 16, 576)), given((8, 16, 1, 576)), given((8, 1, 8192, 576))
    program = compiled(jax.jit(layer).lower(*arrays, given((8,), jnp.int32), given((8, 16, 16), bool)))
    lines = program.as_text().splitlines()
    assert any("custom-call" in line for line in lines)
    assert not [line for line in lines if "8,1,8192,576" in line and (" copy(" in line or " transpose(" in line)]


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:8"])
def test_what_a_kernel_cannot_serve_is_said(topology):
    wrong = {"v": ({"past": 300}, "may hold 256 keys, not 316"), "h": ({"model": "odd"}, "multiple of 16")}[topology[0]]
    MODELS["odd"] = (8, 8, 72)
    try:
        with pytest.raises(ValueError, match=wrong[1]):
            layer_on(topology, **({"model": "llama-3-8b", "slots": 16, "capacity": 2048} | wrong[0]))
    finally:
        del MODELS["odd"]
