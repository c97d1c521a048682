"""The gated delta rule at the sizes of Qwen3.5-27B, through the compilers of TPUs and of an H100."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from support.planned import skip_without_compiler

from specjax.kernels.delta_rule import delta_rule
from specjax.sharding.aot import compiled, devices, lowered

SLICES = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1", "h100:1")
HEADS, SERVED, WIDTH = 16, 3, 128


def program_of(topology, tokens, before):
    skip_without_compiler(topology)
    place = SingleDeviceSharding(devices(topology)[0])
    given = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((2, *shape), dtype, sharding=place)
    keys, values, numbers = (HEADS, WIDTH), (HEADS, SERVED, WIDTH), (HEADS, SERVED)
    block = [given(tokens, *each) for each in (keys, keys, values, numbers, numbers)]
    past = tuple(given(before, *each) for each in (keys, values, numbers)) if before else None
    seen = given(tokens, before + tokens, dtype=jnp.bool_)
    return compiled(lowered(jax.jit(delta_rule), *block, seen, given(HEADS, SERVED, WIDTH, WIDTH), past))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (8, 0), (24, 8)])
@pytest.mark.parametrize("topology", SLICES)
def test_a_kernel_reads_the_states_where_they_lie(topology, tokens, before):
    program = program_of(topology, tokens, before)
    text = program.as_text()
    assert "delta_rule" in text and "triangular" not in text
    states = 2 * HEADS * SERVED * WIDTH * WIDTH * 4
    assert (
        program.memory_analysis().temp_size_in_bytes < 1.2 * states
    )  # the arrays of 32 tokens, and no copy of the states


@pytest.mark.slow
def test_a_wider_tree_has_a_kernel_on_tpus_alone():
    assert "delta_rule" in program_of("v5e:1x1", 64, 0).as_text()
    text = program_of("h100:1", 64, 0).as_text()
    assert "triangular" in text or "trsm" in text
