"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745), and so Pythia (arXiv:2304.01373): layer norms, an MLP without a gate, and
attention and MLP side by side.

The file has q, k and v as one matrix, head by head.
"""

import functools
import re
from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.tensors import Tensor


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    parallel = flag("use_parallel_residual", get("use_parallel_residual"))
    own = plain.every(NormConfig, kind="wide", mean=True, bias=True).every(AttentionConfig, **base.attention_bias(get))
    own = own.every(MLPConfig, hidden_act=base.activation(get), bias=True, gated=False)
    return own.every(LayerConfig, parallel="two_norms" if parallel else None)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.near.qkv_bias, "partial_rotary_factor": config.rope.share,
        "use_parallel_residual": config.layers[0].parallel is not None,
    }  # fmt: skip


_MODULES = {
    "self_attn.q_proj": "attention.query_key_value#0", "self_attn.k_proj": "attention.query_key_value#1",
    "self_attn.v_proj": "attention.query_key_value#2", "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
}  # fmt: skip
_OUTER = {
    "model.embed_tokens": "gpt_neox.embed_in", "model.layers": "gpt_neox.layers", "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}  # fmt: skip
_BUFFER = re.compile(r"\.attention\.(bias|masked_bias)$")


def _text(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Without the masks that old files hold."""
    return {name: tensor for name, tensor in tensors.items() if not _BUFFER.search(name)}


GPT_NEOX = Family(
    "gpt_neox", "GPTNeoXForCausalLM",
    {
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True,
        "use_parallel_residual": True, "partial_rotary_factor": 0.25,
    },
    _read, _write, {},
    fields={
        "rms_norm_eps": ("layer_norm_eps",), "rope_theta": ("rotary_emb_base", "rope_theta"),
        "partial_rotary_factor": ("rotary_pct", "partial_rotary_factor"), "num_key_value_heads": (), "head_dim": (),
    },
    rope=functools.partial(base.rope, partial=True), names=functools.partial(base.renamed, modules=_MODULES, outer=_OUTER),
    runs=lambda config, name: config.near.num_attention_heads, text=_text,
    note="attention before the MLP (`use_parallel_residual`), the share of a head that is rotated (`rotary_pct`), the "
    "activation, attention without biases",
)  # fmt: skip
