"""Deep models: what a stack is without its numbers takes a trace of each kind of layer, however many there are."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx
from support.shapes import changed, small

from specjax.models import DiffusionGemmaConfig, DiffusionGemmaLM, LlamaLM, diffusion_gemma, layer, llama
from specjax.models.gemma_heads import Heads

LLAMA = small(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=5, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, qk_norm=True, sliding_window=3, sliding_layers=(True, False) * 2 + (True,),
)  # fmt: skip
GEMMA = DiffusionGemmaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=5, num_attention_heads=2,
    sliding_layers=(True, False) * 2 + (False,), sliding_window=3, sliding=Heads(4, 2, 1e4, 2), full=Heads(8, 1, 1e6, 1),
    num_experts=2, top_k_experts=1, moe_intermediate_size=4,
)  # fmt: skip
CASES = {"llama": (layer, LlamaLM(LLAMA)), "gemma": (diffusion_gemma, DiffusionGemmaLM(GEMMA))}


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_layer_is_traced_once(name, monkeypatch):
    module, lm = CASES[name]
    made, make = [], module.Layer
    monkeypatch.setattr(module, "Layer", lambda *args, **more: made.append(args) or make(*args, **more))
    change = dataclasses.replace if name == "gemma" else changed
    lm = dataclasses.replace(lm, config=change(lm.config, num_hidden_layers=80, sliding_layers=(True, False) * 40))
    shapes = lm.abstract()
    assert len(shapes["layers"]) == 80 and len(made) == 2
    own = lm.bind(shapes)
    assert len({id(layer) for layer in own.layers}) == 80 and len(made) == 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_the_stack_that_is_made_whole(dtype):
    for whole, ours in (
        (lambda: llama.Llama(LLAMA, dtype, nnx.Rngs(0)), llama._abstract(LLAMA, dtype, None, None)),
        (lambda: diffusion_gemma.DiffusionGemma(GEMMA, dtype, nnx.Rngs(0)), diffusion_gemma._abstract(GEMMA, dtype)),
    ):
        graph, state = nnx.split(nnx.eval_shape(whole))
        assert ours[0] == graph
        assert nnx.to_pure_dict(ours[1]) == nnx.to_pure_dict(state)
