"""EXAONE 4 (arXiv:2507.11407): attention and MLP read the stream as it is, and what they give is normalised; where some layers
have a window, the others have no positions."""

from typing import Any

from specjax.models import gemma_text
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, is_size, shown
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    window = get("sliding_window")
    types = get("layer_types") or _types(window, get("sliding_window_pattern"), plain.num_hidden_layers)
    own = base.windows(plain, types, window).every(AttentionConfig, qk_norm=plain.norm)
    own = own.every(LayerConfig, pre_norms=False, post_norms=True)
    return own if window is None else base.mixers(own, lambda i: {} if own.window(i) else {"rope": None})


def _types(window: Any, every: Any, layers: int) -> list[str]:
    """Every `every`th layer has no window. Published files that say it in letters (`LLLG`) have `layer_types` too."""
    if window is None:
        return [FULL] * layers
    if not is_size(every):
        raise ModelError(f"config.json: sliding_window_pattern must be a number of layers, not {shown(every)}")
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]


def _write(config: ModelConfig) -> dict[str, Any]:
    """A window that no layer has says that none has positions."""
    near, usual = config.near, EXAONE_4.usual["sliding_window"]
    return {
        "layer_types": base.layer_types(config), "sliding_window_pattern": 4,
        "sliding_window": usual if near.window is None and near.rope is None else near.window,
    }  # fmt: skip


EXAONE_4 = Family(
    "exaone4", "Exaone4ForCausalLM",
    {
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    _read, _write, layout=gemma_text.hf_name, note="which layers have a window (`layer_types`)",
)  # fmt: skip
