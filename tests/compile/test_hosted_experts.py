"""Experts in the host's memory through the compiler of a TPU: they stay there, and a step copies few of them."""

import jax
import jax.numpy as jnp
import pytest
from support.planned import skip_without_compiler
from support.shapes import changed, small

from specjax.lm import Block, Wants
from specjax.models import ExpertsConfig, LlamaLM
from specjax.models.formats import read_format
from specjax.plan.held import chip_bytes
from specjax.sharding import aot

LM = LlamaLM(changed(small(64, 512, 512, 1, 4, 2, 128), experts=ExpertsConfig(32, 2, 1024)))


@pytest.mark.slow
def test_a_tpu_leaves_experts_on_its_host():
    skip_without_compiler("v5e:1x1")
    (device,) = aot.devices("v5e:1x1")
    own = jax.sharding.SingleDeviceSharding(device)
    params = read_format("hobbit:host=true").shapes(LM.abstract(jnp.bfloat16))

    def place(path, leaf):
        there = any(getattr(key, "key", None) == "experts" for key in path)
        kind = own.with_memory_kind("pinned_host") if there else own
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kind)

    placed = jax.tree_util.tree_map_with_path(place, params)
    ids = jax.ShapeDtypeStruct((2, 1), jnp.int32, sharding=own)

    def step(params, ids):
        block = Block(ids, jnp.zeros_like(ids), jnp.zeros(2, jnp.int32), None, causal=True)
        return LM(params, block, None, wants=Wants(logits=True)).logits

    memory = aot.compiled(jax.jit(step).lower(placed, ids)).memory_analysis()
    on_chip = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)
    of_experts = placed["layers"][0]["mlp"]["experts"]
    experts = chip_bytes(jax.tree.map(on_chip, of_experts))
    assert chip_bytes(of_experts) == 0  # they lie on no chip
    assert memory.host_argument_size_in_bytes >= experts > 90e6
    assert memory.argument_size_in_bytes < 10e6
    assert memory.temp_size_in_bytes < experts / 5
