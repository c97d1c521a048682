"""Nemotron-4 (arXiv:2402.16819) and Minitron (arXiv:2407.14679): layer norms that scale by 1 + w, and an MLP of squared ReLUs
without a gate.
"""

import functools
from typing import Any

from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.families.llama import biases
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = biases(get, plain).every(NormConfig, kind="offset", mean=True, bias=True)
    return own.every(MLPConfig, hidden_act=base.activation(get), gated=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.near.qkv_bias, "mlp_bias": config.dense.bias,
        "partial_rotary_factor": config.rope.share,
    }  # fmt: skip


NEMOTRON = Family(
    "nemotron", "NemotronForCausalLM",
    {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    _read, _write, {}, fields={"rms_norm_eps": ("norm_eps",)}, rope=functools.partial(base.rope, partial=True),
    note="the share of a head that is rotated (`partial_rotary_factor`), biases of attention (`attention_bias`) and MLP "
    "(`mlp_bias`), the activation",
)  # fmt: skip
