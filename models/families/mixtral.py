"""Mixtral (arXiv:2401.04088): Mistral's layers with experts in place of every MLP."""

from typing import Any

from specjax.models import hf_experts
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.families.llama import all_windowed
from specjax.models.model_config import ModelConfig

_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    return base.sparse(all_windowed(get, plain), hf_experts.from_hf(hf_experts.local(get)))


def _write(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    return hf_experts.local_to_hf(config.experts) | {"sliding_window": config.near.window}


def tensor_name(name: str) -> str:
    """Mixtral's name of a tensor that has this name in Llama's layout.

    >>> tensor_name("model.layers.3.mlp.experts.5.up_proj.weight")
    'model.layers.3.block_sparse_moe.experts.5.w3.weight'
    """
    module, _, kind = name.rpartition(".")
    before, _, matrix = module.rpartition(".")
    if ".mlp.experts." in module:
        module = f"{before}.{_MATRICES[matrix]}"
    return f"{module.replace('.mlp.', '.block_sparse_moe.')}.{kind}"


MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM",
    {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    _read, _write, names=tensor_name,
)  # fmt: skip
