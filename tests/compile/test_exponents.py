"""Coded exponents at the sizes of an 8B model's matrices, through the compilers of TPUs and of an H100."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from support.planned import skip_without_compiler

from specjax.kernels.exponents import numbers
from specjax.models.dfloat11 import usual_words
from specjax.sharding.aot import compiled, devices, lowered


@pytest.mark.parametrize(
    ("topology", "inputs", "outputs"),
    [
        ("v5e:1x1", 1024, 1024),
        ("h100:1", 1024, 1024),
        *(
            pytest.param(chip, 14336, 4096, marks=pytest.mark.slow)
            for chip in ("v5e:1x1", "v5p:2x2x1", "v6e:2x2", "h100:1")
        ),
    ],
)
def test_a_kernel_writes_the_matrix_and_nothing_else(topology, inputs, outputs):
    skip_without_compiler(topology)
    place = SingleDeviceSharding(devices(topology)[0])
    given = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind, sharding=place)
    codes = given(jnp.uint32, usual_words(128), inputs // 128, outputs)
    arrays = given(jnp.uint8, inputs, outputs), codes, given(jnp.uint16, 256, 1, 1)
    program = compiled(lowered(jax.jit(numbers), *arrays))
    assert "coded_exponents/pallas_call" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 1 << 20
