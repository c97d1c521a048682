"""What a GPU's tensor cores are given: operands of 16 bits wherever a model's matrices are bfloat16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import TARGET

from specjax import models
from specjax.kernels.precision import by_tensor_cores
from specjax.lm import Block, Wants

OPERANDS = re.compile(r"dot_general .*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)")


def products(lm, params, platform, precision="default"):
    """The pairs of types that a pass over a block of four tokens multiplies, without those of attention."""
    ids = jnp.zeros((2, 4), jnp.int32)
    block = Block(ids, ids, jnp.zeros((2,), jnp.int32))
    run = lambda params: lm(params, block, None, wants=Wants(logits=True)).logits
    with jax.default_matmul_precision(precision):
        text = jax.jit(run).trace(params).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line and "batching_dims" not in line]
    assert len(lines) >= 7 * lm.num_layers + 1
    return {match.groups() for line in lines if (match := OPERANDS.search(line))}


def test_a_model_in_bfloat16_multiplies_bfloat16():
    params = TARGET.abstract(jnp.bfloat16)
    assert products(TARGET, params, "cuda") == {("bf16", "bf16")}
    assert "f32" in {kind for pair in products(TARGET, params, "cpu") for kind in pair}
    assert products(TARGET, TARGET.abstract(jnp.float32), "cuda") == {("f32", "f32")}


@pytest.mark.slow
def test_full_precision_keeps_the_rows():
    params = TARGET.abstract(jnp.bfloat16)
    assert products(TARGET, params, "cuda", "highest") == {("f32", "f32")}
    cast = models.LlamaLM(TARGET.config, layer_cast=True)
    assert products(cast, params, "cuda") == {("f32", "f32")}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ("int8", "dfloat11"))
def test_matrices_of_few_bits_are_used_in_bfloat16(weights):
    model = models.abstract("tiny", "bfloat16", weights=weights)
    assert products(model.lm, model.params, "cuda") == {("bf16", "bf16")}


@pytest.mark.slow
def test_the_result_has_one_type():
    x, kernel = jnp.ones((2, 3)), jnp.ones((3, 2), jnp.bfloat16)
    product = lambda x: jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    with jax.default_matmul_precision("default"):
        found = jax.jit(lambda x: by_tensor_cores(product, x, kernel.dtype))(x)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full((2, 2), 3.0))
