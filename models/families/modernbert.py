"""ModernBERT's decoder (Ettin, Weller et al. 2025, arXiv:2507.11412): layer norms, one of them for the embedding, windows in
two of three layers, and a dense layer before the head.
"""

import dataclasses
import functools
from typing import Any

from specjax.models import hf_rope
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, an_object, flag, is_size, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.ropes import RopeConfig
from specjax.models.transform import TransformConfig

_IDS = {"bos_token_id": 50281, "pad_token_id": 50283}
"""Ids that transformers needs in a file, whatever the tokenizer."""
_THETAS = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    norm = NormConfig(plain.norm.eps, "wide", mean=True, bias=flag("norm_bias", get("norm_bias")))
    own = plain.mapped(NormConfig, lambda _: norm).every(AttentionConfig, **base.attention_bias(get))
    own = own.every(MLPConfig, hidden_act=base.activation(get), bias=flag("mlp_bias", get("mlp_bias")))
    own = own.every(EmbeddingConfig, norm=norm).every(
        HeadConfig, bias=flag("decoder_bias", get("decoder_bias")),
        transform=TransformConfig(
            base.activation(get, "classifier_activation"), norm, flag("classifier_bias", get("classifier_bias"))
        ),
    )  # fmt: skip
    own = own.each(lambda i, layer: dataclasses.replace(layer, mixer_norm=i > 0))
    types, ropes = _types(get), {kind: _rope(get, kind) for kind in _THETAS}
    window = get("local_attention")
    if window is not None and (not is_size(window) or window < 2):
        raise ModelError(
            f"config.json: local_attention must be null or a number of tokens above 1, not {shown(window)}"
        )
    own = base.windows(own, types, None if window is None else window // 2)
    return base.mixers(own, lambda i: {"rope": ropes[types[i]]})


def _types(get: Fields) -> list[str]:
    every = get("global_attn_every_n_layers")
    if not is_size(every):
        raise ModelError(f"config.json: global_attn_every_n_layers must be a number of layers, not {shown(every)}")
    usual = [SLIDING if i % every else FULL for i in range(get("num_hidden_layers"))]
    return usual if get("layer_types") is None else get("layer_types")


def _rope(get: Fields, kind: str) -> RopeConfig:
    """The rope of a kind of layer; `rope_scaling` holds for both."""
    given = an_object("rope_parameters", get("rope_parameters"))
    rope = {"rope_theta": get(_THETAS[kind])} | an_object(f"rope_parameters: {kind}", given.get(kind))
    rope |= an_object("rope_scaling", get("rope_scaling"))
    return RopeConfig(*hf_rope.from_hf({"rope_parameters": rope}, get("max_position_embeddings")))


def _write(config: ModelConfig) -> dict[str, Any]:
    ropes, head = base.ropes_by_kind(config), config.head
    transform = head.transform or TransformConfig("gelu", config.norm)
    ids = {name: min(number, config.vocab_size - 1) for name, number in _IDS.items()}
    return ids | {
        "layer_types": base.layer_types(config), "rope_parameters": base.rope_parameters(ropes),
        "local_attention": None if config.near.window is None else 2 * config.near.window, "norm_bias": config.norm.bias,
        "attention_bias": config.near.qkv_bias, "mlp_bias": config.dense.bias, "decoder_bias": head.bias,
        "classifier_bias": transform.bias, "classifier_activation": transform.act,
    } | {name: ropes[kind].theta for kind, name in _THETAS.items()}  # fmt: skip


_MODULES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm", "self_attn.o_proj": "attn.Wo",
    "mlp.gate_proj": "mlp.Wi#0", "mlp.up_proj": "mlp.Wi#1", "mlp.down_proj": "mlp.Wo",
} | {f"self_attn.{name}_proj": f"attn.{name}_proj" for name in "qkv"}  # fmt: skip
_OUTER = {
    "model.embed_tokens": "model.embeddings.tok_embeddings", "model.embed_norm": "model.embeddings.norm",
    "model.norm": "model.final_norm", "transform.dense": "lm_head.dense", "transform.norm": "lm_head.norm",
    "lm_head": "decoder",
}  # fmt: skip


MODERNBERT = Family(
    "modernbert-decoder", "ModernBertDecoderForCausalLM",
    {
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "gelu", "classifier_activation": "gelu",
        "decoder_bias": True, "local_attention": 128, "global_attn_every_n_layers": 3, "tie_word_embeddings": True,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
    },
    _read, _write, {}, rope=None, names=functools.partial(base.renamed, modules=_MODULES, outer=_OUTER),
    fields={
        "hidden_act": ("hidden_activation",), "rms_norm_eps": ("norm_eps",), "num_key_value_heads": (), "head_dim": (),
    },
    note="biases of norms, attention, MLP and head (`norm_bias`, `attention_bias`, `mlp_bias`, `decoder_bias`, "
    "`classifier_bias`), which layers have a window (`layer_types`), the activations",
)  # fmt: skip
