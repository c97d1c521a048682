"""Sums over a mesh in another type: the products that it is for, and what it refuses."""

import jax
import pytest

from specjax import models
from specjax.serve.engine import Engine


def test_products_over_the_split_inputs_have_the_type():
    """Of each layer two: attention's last and the MLP's last. All others are as they were."""
    model = models.load("tiny-draft")
    half = models.reduced(model, "bfloat16")
    assert half.reduce_dtype == half.lm.reduce_dtype == "bfloat16" and model.reduce_dtype is None
    counts = []
    for each in (model, half):
        engine = Engine(each, drafter="none")
        state = engine.decoder.empty(engine.params, 2, 64)
        text = str(jax.make_jaxpr(engine.decoder.step)(engine.params, state))
        counts.append(text.count("preferred_element_type=bfloat16"))
    assert counts == [0, 2 * model.lm.num_layers]
    assert models.reduced(half, None).reduce_dtype is None


def test_what_cannot_be():
    with pytest.raises(ValueError, match="unknown reduce_dtype 'int8'; choose float32, bfloat16, float16"):
        models.load("tiny-draft", reduce_dtype="int8")
    other = models.Model(object(), {})
    with pytest.raises(ValueError, match="reduce_dtype 'bfloat16' is for models of the Llama family"):
        models.reduced(other, "bfloat16")
