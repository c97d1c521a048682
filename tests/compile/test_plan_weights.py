"""Steps over matrices in few bits, compiled for TPUs and an H100: they read what is stored and write it in no other type."""

import jax
import jax.numpy as jnp
import pytest
from support.planned import FullChain, skip_without_compiler

from specjax import models
from specjax.decode import Plain, Speculate
from specjax.models import loading
from specjax.models.few_bits import dot, is_quantised
from specjax.models.gguf.blocks import TABLE
from specjax.models.grouped import grouped_dot
from specjax.models.packed_matrix import Packed, Steps
from specjax.plan import command, hlo, pallas, step
from specjax.plan.held import chip_bytes
from specjax.sharding import aot, make_mesh

NAME = "meta-llama/Llama-3.1-8B"


def test_numbers_of_four_bits_take_half_a_byte():
    shape = lambda kind: jax.ShapeDtypeStruct((6, 5), kind)
    assert [chip_bytes(shape(kind)) for kind in (jnp.int4, jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16)] == [
        15,
        30,
        30,
        60,
    ]


def test_a_plan_says_where_load_would_keep_a_file_packed():
    names = ("openai/gpt-oss-20b", "tiny", "meta-llama/Llama-3.1-8B")
    found = [command._packed_file(command.PlanOptions(model=name, topology="v5e:2x2")) for name in names]
    assert found == [True, False, False]


def test_what_an_8b_model_takes():
    """Its layers have 6.98 billion numbers in matrices, table and head 1.05 billion; a scale of 16 bits for 128 numbers, or for
    an output. In four bits it fits the 16 GB of a T4, which has no bfloat16, with room for a cache; in 16 it does not."""
    size = lambda line: chip_bytes(models.abstract(NAME, "float16", weights=line).params) / 1e9
    assert size(None) == pytest.approx(16.06, abs=0.01)
    assert size("int8") == size("fp8") == pytest.approx(6.98 + 2 * 1.05, abs=0.01)
    assert size("int4") == pytest.approx(6.98 * (0.5 + 2 / 128) + 2 * 1.05, abs=0.01)
    assert size("int4:group=32,vocab=true") == pytest.approx(8.03 * (0.5 + 2 / 32), abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "line", "cache"),
    (
        ("v5e:1x1", "int8", "int8"),
        ("v5e:1x1", "int4", None),
        ("v6e:1x1", "int8", None),
        ("h100:1", "int4", None),
        ("h100:1", "fp8", None),
    ),
)
def test_a_step_reads_what_is_stored(topology, line, cache):
    """Of two layers of 8B: no matrix is written whole, in any type, nor a cache, and traffic is at most 1.1 times the ideal. A
    TPU's step has 16 nodes per row; an H100's has one, since its compiler splits products of more rows."""
    skip_without_compiler(topology)
    (device,) = aot.devices(topology)
    mesh = make_mesh("model=1", [device])
    model = loading.with_layers(models.abstract(NAME, "bfloat16", mesh, weights=line, cache_dtype=cache), 2, mesh)
    way = Plain() if topology.startswith("h100") else Speculate(FullChain(length=15))
    with jax.default_matmul_precision("default"):  # as users compile it
        setup = step.prepare(model, way, mesh, batch=4, context=4096)
        program, traffic = step.compiled(setup)
    held = step.sizes(setup)
    assert held.ideal <= traffic.bytes <= 1.1 * held.ideal
    matrices = {x.shape for x in jax.tree.leaves(setup.params["target"], is_leaf=is_quantised) if is_quantised(x)}
    assert len(matrices) == 4
    assert [dims for dims in matrices if traffic.written(dims) or traffic.written(dims[::-1])] == []
    (slots,) = {x.shape for x in jax.tree.leaves(setup.state.cache) if x.ndim == 4}
    assert not traffic.written(slots)
    # nor is there room for one of an MLP's: what there is holds logits and features
    assert step.cost_of(program, traffic).temporaries < max(a * b for a, b in matrices) // 2


def packed(place, values, *lead, table=(), steps=False):
    """The shape of a matrix of 2,048 by 4,096 as a file packs it, with a scale and, of plain codes, a minimum for 32 inputs."""
    shape = lambda size, kind: jax.ShapeDtypeStruct((*lead, *size), kind, sharding=place)
    group = shape((64, 4096), jnp.float8_e8m0fnu if values == jnp.float4_e2m1fn else jnp.float16)
    group = Steps(shape((8, 4096), jnp.float16), shape((64, 4096), jnp.uint8)) if steps else group
    low = group if values == jnp.uint4 and not table else None
    return Packed(shape((1, 1), jnp.bfloat16), shape((2048, 4096), values), group, None, low, table)


@pytest.mark.slow
@pytest.mark.covers("packed", "scaled_dot", "few_bits")
@pytest.mark.parametrize("topology", ("v5e:1x1", "h100:1"))
def test_packed_matrices_are_read_as_they_are(topology):
    """Codes with minima, scales in steps too, floats of four bits, places in a table, and experts by turns: at most 1.1 times
    their bytes on a TPU. An H100 has a kernel for each."""
    skip_without_compiler(topology)
    place = jax.sharding.SingleDeviceSharding(aot.devices(topology)[0])
    x = jax.ShapeDtypeStruct((32, 2048), jnp.bfloat16, sharding=place)
    for kernel in (
        packed(place, jnp.uint4),
        packed(place, jnp.uint4, steps=True),
        packed(place, jnp.float4_e2m1fn),
        packed(place, jnp.uint4, table=TABLE),
    ):
        text = aot.compiled(jax.jit(dot).lower(x, kernel)).as_text()
        if topology.startswith("h100"):
            assert "triton" in text
        else:
            assert hlo.traffic(text).bytes < 1.1 * (chip_bytes(kernel) + 32 * (2048 + 4096) * 2)
    kernels = packed(place, jnp.float4_e2m1fn, 8)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=place)
    text = aot.compiled(jax.jit(grouped_dot).lower(x, kernels, sizes)).as_text()
    if topology.startswith("h100"):
        calls = pallas.kernels(grouped_dot, (x, kernels, sizes), "cuda")
        assert "triton" in text and hlo.traffic(text, calls, rounds=lambda op: 8).bytes < 1.5 * chip_bytes(kernels)
    else:
        assert hlo.traffic(text, rounds=lambda op: 8).bytes < 1.1 * (chip_bytes(kernels) + 32 * (2048 + 4096) * 2)
