"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, an MLP without a gate, and biases."""

import functools
from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.families.llama import all_windowed
from specjax.models.fields import flag
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    biased = flag("use_bias", get("use_bias"))
    own = all_windowed(get, plain).every(NormConfig, kind="wide", mean=True, bias=True)
    own = own.every(AttentionConfig, qkv_bias=biased, o_bias=biased)
    return own.every(MLPConfig, hidden_act=base.activation(get), bias=biased, gated=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"use_bias": config.near.qkv_bias, "sliding_window": config.near.window}


STARCODER2 = Family(
    "starcoder2", "Starcoder2ForCausalLM",
    {
        "max_position_embeddings": 4096, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True, "tie_word_embeddings": True,
    },
    _read, _write, {}, fields={"rms_norm_eps": ("norm_epsilon",)},
    names=functools.partial(
        base.renamed, modules={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}, outer={}
    ),
    note="a window in all layers (`sliding_window`), no biases (`use_bias`), the activation",
)  # fmt: skip
