"""How the compilers of TPUs lay out caches, which kernels have to know."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from support.planned import needs_libtpu

from specjax.kernels.layouts import slots_last
from specjax.sharding import aot

SHAPES = [
    (16, 64), (96, 64), (96, 96), (128, 96), (136, 64), (136, 80), (200, 96), (256, 80), (384, 64), (8192, 32), (8192, 64),
    (8192, 128), (1000, 192), (136, 192), (8192, 256),
]  # fmt: skip
"""Slots, and the width of heads."""


@needs_libtpu
@pytest.mark.parametrize("topology", ("v5e:1x1", "v5p:2x2x1", "v6e:1x1"))
def test_which_axis_of_a_cache_comes_last(topology):
    place = SingleDeviceSharding(aot.devices(topology)[0])
    found = {}
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        given = [jax.ShapeDtypeStruct((2, 3, *shape), dtype, sharding=place) for shape in SHAPES]
        ((formats,), _) = jax.jit(lambda caches: [x + x for x in caches]).lower(given).compile().input_formats
        for shape, form in zip(SHAPES, formats, strict=True):
            found[shape, dtype.__name__] = form.layout.major_to_minor
    for (shape, dtype), order in found.items():
        assert order == ((0, 1, 3, 2) if slots_last(*shape) else (0, 1, 2, 3)), (shape, dtype)
