"""The config files of LLaDA2.0 (arXiv:2512.15745), 2.1 and 2.2, whose tensors are alike.

Layers, fields and tensors are those of Ling 2 (`specjax.models.families.ling`). A token sees its own block and earlier ones. In
2.2 a block of tokens first chooses experts together (`expert_capacity`), in place of groups (`specjax.models.block_choice`).
"""

import dataclasses
from typing import Any

from specjax.models import hf_config
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.families import base, ling
from specjax.models.fields import check_fixed, is_id, is_size, shown
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
_CAPACITY = "expert_capacity"
_EDITS = "delete_token_id", "split_token_id"
_UNGROUPED = {"n_group": 1, "topk_group": 1}
"""Groups of experts as they are in a model whose blocks choose: its file names others, which nothing reads."""
# Defaults of the published configuration class for fields that `config.json` omits.
_DEFAULTS = {
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "num_key_value_heads": None, "head_dim": None, "num_experts": 16,
    "num_experts_per_tok": 2, "num_shared_experts": 0, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0, "partial_rotary_factor": 0.5, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": True,
}  # fmt: skip


def from_hf(config: dict[str, Any], block: int) -> ModelConfig:
    """Reads the `config.json` of LLaDA 2.

    Args:
      config: parsed.
      block: the length of its blocks.

    Raises:
      ModelError: on what the loader does not support, and on missing or inconsistent fields.
    """
    check_fixed(config, _FIXED, "LLaDA 2")
    ours = {"architectures": [ling.LING_2.architecture]}
    capacity = config.get(_CAPACITY) or 0
    chosen = _UNGROUPED | {_CAPACITY: None} if capacity else {}
    shape = hf_config.from_hf(_DEFAULTS | config | ours | chosen, besides={*_FIXED, "is_causal"})
    shape = dataclasses.replace(shape, family="")  # without blocks, the first family that can say it is written
    return _choosing(shape, capacity, block) if capacity else shape


def _choosing(shape: ModelConfig, capacity: Any, block: int) -> ModelConfig:
    """The model whose blocks of so many tokens choose `capacity` experts.

    Raises:
      ModelError: for a capacity that leaves a token too few experts, or is above what there is.
    """
    experts = shape.experts
    assert experts is not None, "Ling 2 has layers with experts"
    if not is_size(capacity) or not experts.num_experts_per_tok <= capacity <= experts.num_experts:
        raise ModelError(
            f"config.json: {_CAPACITY} {shown(capacity)} must be the number of experts that a block chooses, from "
            f"{experts.num_experts_per_tok} (num_experts_per_tok) to {experts.num_experts} (num_experts)"
        )
    return shape.every(ExpertsConfig, capacity=capacity, block_size=block)


def edit_ids(config: dict[str, Any], mask_id: int) -> tuple[int, int]:
    """The ids of the tokens that delete and split; -1 and -1 if the file names neither.

    Raises:
      ModelError: for one without the other, and for ids that are not three different ones.
    """
    delete, split = (config.get(field) for field in _EDITS)
    if delete is None and split is None:
        return -1, -1
    if not (is_id(delete) and is_id(split)) or len({mask_id, delete, split}) < 3:
        raise ModelError(
            f"config.json needs {' and '.join(_EDITS)}, two ids besides the mask's {mask_id}, or neither; got "
            f"{shown(delete)} and {shown(split)}"
        )
    return delete, split


def edits_to_hf(delete_id: int, split_id: int) -> dict[str, int]:
    """The fields of a file for these tokens; empty for -1."""
    return dict(zip(_EDITS, (delete_id, split_id), strict=True)) if delete_id >= 0 else {}


def is_one(config: ModelConfig) -> bool:
    """Whether it describes such a model."""
    return config.experts is not None and config.experts.scoring == "sigmoid"


def to_hf(config: ModelConfig, block: int) -> dict[str, Any]:
    """The `config.json` of LLaDA 2.

    Args:
      config: the model's.
      block: the length of its blocks.

    Raises:
      ModelError: if LLaDA 2 cannot express the model.
    """
    c, experts = config, config.experts
    if experts is not None and experts.capacity:
        if experts.block_size != block:
            raise ModelError(
                f"experts are chosen in blocks of {experts.block_size}, and the model has blocks of {block}: LLaDA 2 has one "
                "length for both"
            )
        return to_hf(c.every(ExpertsConfig, capacity=0, block_size=0), block) | {_CAPACITY: experts.capacity}
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
