"""Configs of the older families drawn by seed, odd ones too: the logits of transformers, of the model and of what is saved."""

import jax
import numpy as np
import pytest
from support.tiny_families import LM

from specjax import models
from specjax.lm import Block, Wants

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.covers(
        "gpt_neox", "phi", "gpt2", "starcoder2", "stablelm", "opt", "nemotron", "modernbert", "families"
    ),
]
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh", "relu2", "gelu_fast")
WHOLE = {"rope_type": "default", "rope_theta": 300.0}
ROPES = (
    None,
    WHOLE | {"partial_rotary_factor": 0.5},
    WHOLE | {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
)
COUNT = 23


def drawn(kind, rng):
    """The fields of a config of this class."""
    one = lambda *values: values[rng.integers(len(values))]
    flag = lambda: bool(rng.integers(2))
    heads, width, inner = one(2, 3, 4, 6), one(8, 16, 24), int(rng.integers(20, 90))
    groups, act, eps, rope = one(1, heads), one(*ACTIVATIONS), one(1e-5, 1e-3, 0.1), one(*ROPES)
    shared = {
        "vocab_size": int(rng.integers(50, 140)), "hidden_size": heads * width, "num_hidden_layers": one(1, 2, 3),
        "num_attention_heads": heads, "max_position_embeddings": 64, "tie_word_embeddings": flag(), "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    match kind:
        case "GPTNeoX":
            own = {
                "use_parallel_residual": flag(),
                "attention_bias": flag(),
                "layer_norm_eps": eps,
                "rope_parameters": rope,
            }
        case "Phi":
            own = {
                "num_key_value_heads": groups,
                "qk_layernorm": flag(),
                "layer_norm_eps": eps,
                "rope_parameters": rope,
            }
        case "GPT2":
            own = {
                "n_inner": one(None, inner), "activation_function": act, "layer_norm_epsilon": eps,
                "scale_attn_weights": flag(), "scale_attn_by_inverse_layer_idx": flag(),
            }  # fmt: skip
            return shared | own
        case "Starcoder2":
            own = {
                "num_key_value_heads": groups, "norm_epsilon": eps, "use_bias": flag(), "sliding_window": one(None, 5),
                "rope_parameters": one(None, WHOLE),
            }  # fmt: skip
        case "StableLm":
            own = {
                "num_key_value_heads": groups, "layer_norm_eps": eps, "use_qkv_bias": flag(), "qk_layernorm": flag(),
                "use_parallel_residual": flag(), "rope_parameters": rope,
            }  # fmt: skip
        case "OPT":
            return shared | {"ffn_dim": inner, "activation_function": act, "enable_bias": flag()}
        case "Nemotron":
            own = {
                "num_key_value_heads": groups, "head_dim": one(8, 12), "norm_eps": eps, "attention_bias": flag(),
                "mlp_bias": flag(), "rope_parameters": rope,
            }  # fmt: skip
        case "ModernBertDecoder":
            own = {
                "norm_eps": eps, "norm_bias": flag(), "attention_bias": flag(), "mlp_bias": flag(), "decoder_bias": flag(),
                "classifier_bias": flag(), "classifier_activation": one("gelu", "relu"), "hidden_activation": act,
                "local_attention": one(8, 11, 40),
            }  # fmt: skip
    return shared | {"intermediate_size": inner, "hidden_act": act} | own


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "kind", ("GPTNeoX", "Phi", "GPT2", "Starcoder2", "StableLm", "OPT", "Nemotron", "ModernBertDecoder")
)
def test_logits_of_a_drawn_config(kind, seed, tmp_path):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**drawn(kind, rng))
    made = getattr(transformers, LM.get(kind, f"{kind}ForCausalLM"))
    theirs = made(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            centre = 1.0 if name.endswith("weight") and parameter.ndim == 1 and kind != "Nemotron" else 0.0
            parameter.normal_(centre, 0.3 if parameter.ndim == 1 else 0.2)
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path / "own")
    ids = rng.integers(3, config.vocab_size, (2, COUNT))
    ours = models.load(tmp_path / "own", dtype="float32")
    models.save(tmp_path / "again", ours.lm, ours.params)
    again = made.from_pretrained(tmp_path / "again", dtype="float32").eval()
    with torch.no_grad():
        want, back = (model(torch.as_tensor(ids)).logits.numpy() for model in (theirs, again))
    assert want.std() > 0.3
    at = np.broadcast_to(np.arange(COUNT), ids.shape)
    block = Block(ids.astype(np.int32), at.astype(np.int32), np.zeros(2, np.int32))
    run = jax.jit(lambda params: ours.lm(params, block, None, wants=Wants(logits=True)).logits)
    np.testing.assert_allclose(run(ours.params), want, atol=1e-4)
    np.testing.assert_allclose(back, want, atol=2e-5)
    assert again.config.model_type == config.model_type == ours.lm.config.family
