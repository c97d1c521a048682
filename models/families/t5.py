"""T5 (Raffel et al. 2020, arXiv:1910.10683), T5 v1.1 and Flan-T5, and mT5 (Xue et al. 2021, arXiv:2010.11934): an encoder and
a decoder whose scores are not scaled and have numbers added by distance."""

import dataclasses
import math
from typing import Any

from specjax.models import weights
from specjax.models.attention import AttentionConfig
from specjax.models.cross import CrossConfig
from specjax.models.distances import DistancesConfig
from specjax.models.embedding import EmbeddingConfig
from specjax.models.encoder import EncoderConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import check_depth, flag, is_size, shown
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import HeadConfig, ModelConfig

NO_LIMIT = 1 << 20
"""How many positions its texts may have: distances have no end."""
_ACTS = {"relu": ("relu", False), "gelu": ("gelu", False), "gated-gelu": ("gelu_pytorch_tanh", True)}
_PROJECTIONS = {(act, gated): name for name, (act, gated) in _ACTS.items()} | {("silu", True): "gated-silu"}


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    depth, buckets, reach = (
        get(name) for name in ("num_layers", "relative_attention_num_buckets", "relative_attention_max_distance")
    )
    if not is_size(depth):
        raise ModelError(f"config.json: num_layers must be a positive integer, not {shown(depth)}")
    check_depth(depth)
    if not is_size(buckets) or buckets % 4 or not is_size(reach) or reach <= buckets // 2:
        raise ModelError(
            "config.json: relative_attention_num_buckets must be a multiple of 4, and relative_attention_max_distance more "
            f"than half of it, not {shown(buckets)} and {shown(reach)}"
        )
    act, gated = _activation(get("feed_forward_proj"))
    own = plain.near
    attention = AttentionConfig(
        own.num_attention_heads, own.num_attention_heads, own.head_dim, rope=None, scale=1.0, distances=True
    )
    layer = LayerConfig(attention, MLPConfig(plain.dense.intermediate_size, act, gated=gated), plain.norm)
    distances = DistancesConfig(own.num_attention_heads, buckets, reach)
    embedding = EmbeddingConfig(plain.vocab_size)
    encoder = EncoderConfig(
        (layer,) * depth, embedding, plain.norm, distances=dataclasses.replace(distances, both_ways=True)
    )
    cross = CrossConfig(own.num_attention_heads, own.head_dim, scale=1.0)
    layers = (dataclasses.replace(layer, cross=cross),) * plain.num_hidden_layers
    scaled = get("scale_decoder_outputs")
    scaled = plain.head.tied if scaled is None else flag("scale_decoder_outputs", scaled)
    scaling = math.sqrt(plain.hidden_size) if scaled else 1.0
    head = HeadConfig(plain.head.tied, logits_scaling=scaling)
    return ModelConfig(
        plain.hidden_size, embedding, layers, plain.norm, head, plain.max_position_embeddings, encoder, distances
    )


def _activation(name: Any) -> tuple[Any, bool]:
    """The activation of a feed-forward, and whether it has a gate."""
    if name in _ACTS:
        return _ACTS[name]
    kind, _, act = str(name).rpartition("-")
    if kind not in ("", "gated"):
        raise ModelError(
            f"config.json: feed_forward_proj must be an activation or gated- and an activation, not {shown(name)}"
        )
    return base.activation(lambda _: act, "feed_forward_proj"), kind == "gated"


def _write(config: ModelConfig) -> dict[str, Any]:
    encoder, distances, dense = config.encoder, config.distances, config.dense
    if encoder is None or distances is None:
        raise ModelError("T5 has an encoder, and numbers by distance")
    usual = f"{'gated-' if dense.gated else ''}{dense.hidden_act}"
    return {
        "num_layers": len(encoder.layers), "relative_attention_num_buckets": distances.num_buckets,
        "relative_attention_max_distance": distances.max_distance, "is_encoder_decoder": True,
        "scale_decoder_outputs": config.head.logits_scaling != 1.0,
        "feed_forward_proj": _PROJECTIONS.get((dense.hidden_act, dense.gated), usual),
    }  # fmt: skip


_SELF = {f"self_attn.{name}_proj": f"layer.0.SelfAttention.{name}" for name in "qkvo"} | {
    "input_layernorm": "layer.0.layer_norm"
}
_CROSS = {f"cross_attn.{name}_proj": f"layer.1.EncDecAttention.{name}" for name in "qkvo"} | {
    "cross_norm": "layer.1.layer_norm"
}
_OUTER = {
    "model.layers": "block", "model.norm": "final_layer_norm",
    "distances": "block.0.layer.0.SelfAttention.relative_attention_bias",
}  # fmt: skip


def _names(name: str) -> str:
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        return name.replace("model.embed_tokens", "shared")
    encodes = name.startswith("encoder.")
    at = 1 if encodes else 2
    feed = {
        "post_attention_layernorm": f"layer.{at}.layer_norm", "mlp.gate_proj": f"layer.{at}.DenseReluDense.wi_0",
        "mlp.up_proj": f"layer.{at}.DenseReluDense.wi_1", "mlp.down_proj": f"layer.{at}.DenseReluDense.wo",
    }  # fmt: skip
    own = base.renamed(name.removeprefix("encoder."), _SELF | _CROSS | feed, _OUTER)
    return f"{'encoder' if encodes else 'decoder'}.{own}"


@dataclasses.dataclass(frozen=True)
class _T5(Family):
    def names_of(self, config: ModelConfig) -> weights.Names:
        """See `Family.names_of`; a feed-forward without a gate has another name for its first product."""
        return _names if config.dense.gated else lambda name: _names(name).replace(".wi_1.", ".wi.")


def _text(tensors: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Without the copies of the table of embeddings, and the table of distances that old files have for the source."""
    twice = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    unused = "layer.1.EncDecAttention.relative_attention_bias.weight"
    found = {name: x for name, x in tensors.items() if not name.endswith(unused)}
    return {name: x for name, x in found.items() if name not in twice or "shared.weight" not in tensors}


T5 = _T5(
    "t5", "T5ForConditionalGeneration",
    {
        "vocab_size": 32128, "hidden_size": 512, "head_dim": 64, "intermediate_size": 2048, "num_attention_heads": 8,
        "num_layers": 6, "num_hidden_layers": lambda get: get("num_layers"), "rms_norm_eps": 1e-6,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": "relu",
        "tie_word_embeddings": True, "max_position_embeddings": NO_LIMIT, "is_encoder_decoder": True,
    },
    _read, _write, {"is_encoder_decoder": (True,)}, rope=None, text=_text,
    fields={
        "hidden_size": ("d_model",), "head_dim": ("d_kv",), "intermediate_size": ("d_ff",),
        "num_attention_heads": ("num_heads",), "num_hidden_layers": ("num_decoder_layers",),
        "rms_norm_eps": ("layer_norm_epsilon",), "hidden_act": (),
        "num_key_value_heads": (), "max_position_embeddings": (),
    },
    note="an encoder of another depth (`num_decoder_layers`), the feed-forward (`feed_forward_proj`), buckets of distances; a "
    "head of its own (`tie_word_embeddings` false, v1.1 and Flan), otherwise what the head reads is scaled, unless "
    "`scale_decoder_outputs` says no",
)  # fmt: skip
MT5 = dataclasses.replace(
    T5, model_type="mt5", architecture="MT5ForConditionalGeneration",
    usual={
        **T5.usual, "vocab_size": 250112, "feed_forward_proj": "gated-gelu", "num_attention_heads": 6,
        "intermediate_size": 1024, "num_layers": 8, "scale_decoder_outputs": False,
    },
)  # fmt: skip
