"""SmolLM3 (huggingface.co/blog/smollm3): Llama's layers; every fourth has no positions."""

from typing import Any

from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.families.llama import biases
from specjax.models.fields import FULL, SLIDING, flag
from specjax.models.model_config import ModelConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Reads `no_rope_layers`, which has 1 for the layers that do rotate.

    The other layers have the window, if there is one and `layer_types` does not decide."""
    rotates = base.rotates(get, get("no_rope_layers"), plain.num_hidden_layers)
    window = get("sliding_window") if flag("use_sliding_window", get("use_sliding_window")) else None
    types = get("layer_types")
    types = [FULL if one or window is None else SLIDING for one in rotates] if types is None else types
    own = base.windows(biases(get, plain), types, window)
    return base.mixers(own, lambda i: {} if rotates[i] else {"rope": None})


def _write(config: ModelConfig) -> dict[str, Any]:
    c = config
    return {
        "no_rope_layers": [int(one.rope is not None) for one in c.attentions], "mlp_bias": c.dense.bias,
        "attention_bias": c.near.qkv_bias, "layer_types": base.layer_types(c), "sliding_window": c.near.window,
        "use_sliding_window": c.near.window is not None,
        "pad_token_id": None,  # transformers' default does not exist in a small vocabulary
    }  # fmt: skip


SMOLLM3 = Family(
    "smollm3", "SmolLM3ForCausalLM",
    {
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    _read, _write, note="which layers have no positions (`no_rope_layers`), windows, biases of attention and MLP",
)  # fmt: skip
