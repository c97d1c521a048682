"""The config files of LLaDA2.0 (arXiv:2512.15745) and 2.1, whose folders are alike.

Layers, fields and tensors are those of Ling 2 (`specjax.models.families.ling`). A token sees its own block and earlier ones.
"""

import dataclasses
from typing import Any

from specjax.models import hf_config
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base, ling
from specjax.models.fields import check_fixed, shown
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig

MASK, BLOCK = 156895, 32
"""The mask's id and the block length of published models, whose `config.json` omits both."""

# Values that the loader relies on. A config with other values describes another model.
_FIXED = {
    "score_function": ("sigmoid",), "norm_topk_prob": (True,), "norm_head": (False,), "num_nextn_predict_layers": (0, None),
    "moe_router_enable_expert_bias": (True,), "use_sliding_window": (False, None),
}  # fmt: skip
_BY_BLOCKS = "expert_capacity"
"""Fields of LLaDA 2.2, whose tokens choose among the experts that their block has chosen."""
# Defaults of the published configuration class for fields that `config.json` omits.
_DEFAULTS = {
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "num_key_value_heads": None, "head_dim": None, "num_experts": 16,
    "num_experts_per_tok": 2, "num_shared_experts": 0, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0, "partial_rotary_factor": 0.5, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": True,
}  # fmt: skip


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """Reads the `config.json` of LLaDA 2.

    Raises:
      ModelError: on what the loader does not support, and on missing or inconsistent fields.
    """
    check_fixed(config, _FIXED, "LLaDA 2")
    if config.get(_BY_BLOCKS):
        raise ModelError(
            f"config.json: {_BY_BLOCKS} {shown(config[_BY_BLOCKS])} is of LLaDA 2.2, where a block of tokens chooses its "
            "experts together, which is not supported: load a LLaDA 2.0 or 2.1 model"
        )
    ours = {"architectures": [ling.LING_2.architecture]}
    shape = hf_config.from_hf(_DEFAULTS | config | ours, besides={*_FIXED, "is_causal"})
    return dataclasses.replace(shape, family="")  # without blocks, the first family that can say it is written


def is_one(config: ModelConfig) -> bool:
    """Whether it describes such a model."""
    return config.experts is not None and config.experts.scoring == "sigmoid"


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of LLaDA 2.

    Raises:
      ModelError: if LLaDA 2 cannot express the model.
    """
    c, experts = config, config.experts
    sparse = base.sparse_layers(c)
    dense = sparse.count(False)
    first = any(sparse) and all(sparse[dense:])
    normed = experts is not None and experts.norm_topk_prob == (experts.num_experts_per_tok != 1)
    if experts is None or not (first and normed) or c.dense.bias or c.near.window is not None:
        raise ModelError(
            "a model whose experts are chosen by sigmoids is written as LLaDA 2, which has no sliding window, no biases in its "
            "MLPs, dense layers only before the others, and experts' weights that are divided by their sum"
        )
    bare = c.every(RopeConfig, share=1.0).every(AttentionConfig, qk_norm=None, qkv_bias=False, o_bias=False)
    plain = hf_config.to_hf(bare.mapped(LayerConfig, lambda layer: dataclasses.replace(layer, feed=c.dense)))
    fixed = {name: allowed[0] for name, allowed in _FIXED.items()}
    return {name: x for name, x in plain.items() if name not in ("attention_bias", "mlp_bias")} | fixed | ling.write(c)
