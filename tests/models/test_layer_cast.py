"""LayerCast: parameters of 16 bits, and everything that is computed with them as if they had been float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, TARGET

from specjax import models
from specjax.lm import Block, Wants
from specjax.models.tabular import TabularLM


def passes(lm, params):
    """Logits of a cached prompt of 5 tokens and a block of 3, and the cache."""
    cache = lm.init_cache(2, 16, jax.tree.leaves(params)[0].dtype)
    ids = jnp.arange(16, dtype=jnp.int32).reshape(2, 8) * 5
    places = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[None], ids.shape)
    first = Block(ids[:, :5], places[:, :5], jnp.zeros((2,), jnp.int32))
    cache = lm.commit(cache, lm(params, first, cache, wants=Wants()).delta, None, jnp.zeros((2,), jnp.int32))
    rest = Block(ids[:, 5:], places[:, 5:], jnp.full((2,), 5, jnp.int32))
    return lm(params, rest, cache, wants=Wants(logits=True)).logits, cache


@pytest.mark.slow
def test_computes_as_float32_does_with_the_rounded_weights():
    whole = models.Model(TARGET, TARGET.init(jax.random.key(0)), name="random", dtype=jnp.dtype("float32"))
    cast, half = (models.retyped(whole, kind) for kind in ("layercast", "bfloat16"))
    assert (cast.dtype, cast.dtype_name, half.dtype_name) == (half.dtype, "layercast", "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(cast.params)} == {jnp.dtype("bfloat16")}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), cast.params)
    got, cache = passes(cast.lm, cast.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("float32")}
    want = passes(TARGET, wide)[0]
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert np.abs(passes(half.lm, half.params)[0] - want).max() > 1e-4  # a cache of 16 bits is another model
    assert models.retyped(cast, "float32").lm == TARGET


def test_asks_for_full_precision_whatever_the_default():
    params, lm = TARGET.abstract(jnp.bfloat16), models.LlamaLM(CONFIG, layer_cast=True)
    with jax.default_matmul_precision("bfloat16"):
        text = str(jax.make_jaxpr(lambda params: passes(lm, params)[0])(params))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") >= 2 * 7 + 1


def test_refused():
    with pytest.raises(
        ValueError, match="layercast is for models of the Llama family, not for TabularLM: choose float32"
    ):
        models.retyped(
            models.Model(TabularLM(4), {"table": jnp.zeros((4, 4))}, dtype=jnp.dtype("float32")), "layercast"
        )
    with pytest.raises(ValueError, match="choose float32, bfloat16, float16"):
        models.load("tiny", dtype="float8")
