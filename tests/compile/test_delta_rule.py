"""The gated delta rule at the sizes of Qwen3.5-27B, through the compilers of TPUs and of an H100."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from support.planned import skip_without_compiler

from specjax.kernels.delta_rule import delta_rule
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, llama_config
from specjax.models.layer import LayerConfig
from specjax.models.states.gated_delta import GatedDeltaConfig
from specjax.models.states.kda import KimiDeltaConfig
from specjax.models.states.mamba2 import Mamba2Config
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
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * states  # arrays of 32 tokens, and no copy of the states


@pytest.mark.slow
def test_a_wider_tree_has_a_kernel_on_tpus_alone():
    assert "delta_rule" in program_of("v5e:1x1", 64, 0).as_text()
    text = program_of("h100:1", 64, 0).as_text()
    assert "triangular" in text or "trsm" in text


MIXERS = {
    "gated_delta": GatedDeltaConfig(2, 6, WIDTH, WIDTH),
    "kimi_delta": KimiDeltaConfig(6, 6, WIDTH, WIDTH),
    "mamba2": Mamba2Config(6, 64, WIDTH),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_a_gpu_copies_no_matrices_of_a_mixer_side_by_side(name):
    """Beside products of six outputs, which fill no tile."""
    skip_without_compiler("h100:1")
    config = dataclasses.replace(llama_config(64, 1024, 1024, 1, 2, 2, 64), layers=(LayerConfig(MIXERS[name], None),))
    lm, place = LlamaLM(config), SingleDeviceSharding(devices("h100:1")[0])
    given = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    params = jax.tree.map(given, lm.abstract(jnp.bfloat16))
    cache = jax.tree.map(given, jax.eval_shape(lambda: lm.init_cache(8, 64)))

    def step(params, cache, tokens):
        at = jnp.zeros((8, 1), jnp.int32)
        return lm(params, Block(tokens, at, at[:, 0]), cache, wants=Wants(final=True))

    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32, sharding=place)
    text = compiled(lowered(jax.jit(step), params, cache, tokens)).as_text()
    assert "bf16[1024,384]" in text or "bf16[1024,768]" in text  # the matrices are bfloat16's
    joined = [int(width) for width in re.findall(r"bf16\[1024,(\d+)\]\S* concatenate", text)]
    assert all(width % 16 == 0 for width in joined if width > 16), joined  # whole tiles are joined within the product
