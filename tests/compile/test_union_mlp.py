"""MLPs over a union of experts at published sizes, through the compilers of TPUs and of an H100."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from support.planned import skip_without_compiler

from specjax.kernels.union_mlp import union_mlp
from specjax.sharding.aot import compiled, devices, lowered

EXPERTS, WIDTH, SIZE = 48, 1536, 128
"""Of BlockFFN with 0.8B parameters."""


@pytest.mark.slow
@pytest.mark.parametrize("rows", (1, 32))
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32), ids=("bfloat16", "float32"))
@pytest.mark.parametrize("topology", ("v5e:1x1", "h100:1"))
def test_its_kernel_compiles_and_copies_no_matrix(topology, dtype, rows):
    skip_without_compiler(topology)
    place = SingleDeviceSharding(devices(topology)[0])
    given = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    inner = EXPERTS * SIZE
    arrays = given((rows, WIDTH), jnp.float32), given((rows, EXPERTS), jnp.float32)
    arrays += given((WIDTH, inner), dtype), given((inner, WIDTH), dtype)
    program = compiled(lowered(jax.jit(union_mlp), *arrays))
    text = program.as_text()
    assert all(word in text for word in ("union_mlp", "custom-call", "conditional"))
    assert program.memory_analysis().temp_size_in_bytes < WIDTH * inner * jnp.dtype(dtype).itemsize
