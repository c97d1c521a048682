"""Phi-1 (arXiv:2306.11644), 1.5 (arXiv:2309.05463) and 2: attention and MLP side by side, after one layer norm, an MLP without
a gate, and biases everywhere, in the head too.
"""

import functools
from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import HeadConfig, ModelConfig
from specjax.models.norms import NormConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    norm = NormConfig(plain.norm.eps, "wide", mean=True, bias=True)
    qk_norm = norm if flag("qk_layernorm", get("qk_layernorm")) else None
    own = plain.mapped(NormConfig, lambda _: norm).every(AttentionConfig, qkv_bias=True, o_bias=True, qk_norm=qk_norm)
    own = own.every(MLPConfig, hidden_act=base.activation(get), bias=True, gated=False)
    return own.every(LayerConfig, parallel="one_norm").every(HeadConfig, bias=True)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"qk_layernorm": config.near.qk_norm is not None, "partial_rotary_factor": config.rope.share}


_MODULES = {
    "self_attn.o_proj": "self_attn.dense", "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
}  # fmt: skip


PHI = Family(
    "phi", "PhiForCausalLM",
    {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    _read, _write, {}, fields={"rms_norm_eps": ("layer_norm_eps",)}, rope=functools.partial(base.rope, partial=True),
    names=functools.partial(base.renamed, modules=_MODULES, outer={"model.norm": "model.final_layernorm"}),
    note="the share of a head that is rotated (`partial_rotary_factor`), norms of q and k (`qk_layernorm`), the activation",
)  # fmt: skip
