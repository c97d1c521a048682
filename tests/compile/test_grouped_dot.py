"""Grouped products at the sizes of published experts, through the compilers of TPUs and of an H100."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from support.planned import skip_without_compiler

from specjax.kernels.grouped_dot import grouped_dot
from specjax.sharding.aot import compiled, devices, lowered

SIZES = {"small": (64, 8, 256, 384), "Qwen3-235B-A22B": (1024, 16, 4096, 1536), "gpt-oss-120b": (512, 16, 2880, 5760)}
"""Rows, experts of a device, inputs and outputs."""


def program_of(topology, sizes, dtype, stored=jnp.bfloat16, precision="default"):
    skip_without_compiler(topology)
    place = SingleDeviceSharding(devices(topology)[0])
    given = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    rows, count, inputs, outputs = SIZES[sizes]

    def product(*arrays):
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else precision):
            return grouped_dot(*arrays)

    arrays = given((rows, inputs), dtype), given((count, inputs, outputs), stored), given((count,), jnp.int32)
    return compiled(lowered(jax.jit(product), *arrays))


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32), ids=("bfloat16", "layercast"))
@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ("v5e:1x1", "small"),
        ("h100:1", "small"),
        *(pytest.param("h100:1", name, marks=pytest.mark.slow) for name in tuple(SIZES)[1:]),
    ],
)
def test_matrices_are_neither_copied_nor_widened(topology, sizes, dtype):
    """`layercast` computes with float32 rows, in full precision."""
    program, (_, *shape) = program_of(topology, sizes, dtype), SIZES[sizes]
    text = program.as_text()
    assert "ragged-dot-" in text or "grouped_dot/pallas_call" in text
    whole = ",".join(map(str, shape))
    assert f"bf16[{whole}]" in text and f"f32[{whole}]" not in text
    assert program.memory_analysis().temp_size_in_bytes < shape[0] * shape[1] * shape[2]  # half of them


@pytest.mark.parametrize("topology", ("v5e:1x1", "h100:1"))
def test_narrow_rows_compile_where_full_precision_is_asked_for(topology):
    """As those of a bfloat16 model are where a program sets it for the float32 around it."""
    text = program_of(topology, "small", jnp.bfloat16, precision="highest").as_text()
    assert "ragged-dot-" in text or "grouped_dot/pallas_call" in text


def test_an_h100_widens_no_int8():
    program, (_, *shape) = program_of("h100:1", "small", jnp.bfloat16, jnp.int8), SIZES["small"]
    whole = ",".join(map(str, shape))
    text = program.as_text()
    assert "grouped_dot/pallas_call" in text and f"s8[{whole}]" in text and f"bf16[{whole}]" not in text
