"""BART (Lewis et al. 2020, arXiv:1910.13461), mBART (Liu et al. 2020, arXiv:2001.08210), Marian (Junczys-Dowmunt et al. 2018,
arXiv:1804.00344) and Whisper (Radford et al. 2022, arXiv:2212.04356): encoders and decoders with layer norms and biases."""

import dataclasses
import math
from typing import Any

from specjax.models import weights
from specjax.models.attention import AttentionConfig
from specjax.models.cross import CrossConfig
from specjax.models.embedding import EmbeddingConfig, PositionsConfig
from specjax.models.encoder import EncoderConfig, FramesConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import check_depth, flag, is_size, shown
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import HeadConfig, ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.tensors import Tensor, zeros

_NORM = NormConfig(1e-5, "wide", mean=True, bias=True)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What differs between the four.

    Attributes:
      pre: whether norms come before the branches, and one after the last layer; otherwise they come after each sum.
      embed_norm: whether embeddings are normed.
      offset: the row of position 0; None: positions are sinusoids.
      pad: the id of padding, which transformers needs in a file.
      frames: whether the source is frames of sound.
    """

    pre: bool
    embed_norm: bool
    offset: int | None
    pad: int
    frames: bool = False

    def read(self, get: Fields, plain: ModelConfig) -> ModelConfig:
        """The model of a file's fields."""
        depth, wide, heads = (get(name) for name in ("encoder_layers", "encoder_ffn_dim", "encoder_attention_heads"))
        wrong = [one for one in (depth, wide, heads) if not is_size(one)]
        if wrong or plain.hidden_size % heads:
            raise ModelError(
                "config.json: encoder_layers, encoder_ffn_dim and encoder_attention_heads must be positive integers, and heads "
                f"divide d_model {plain.hidden_size}; they are {shown(depth)}, {shown(wide)} and {shown(heads)}"
            )
        check_depth(depth)
        act, size, own = base.activation(get), plain.hidden_size, plain.near
        norm = _NORM if self.embed_norm else None
        scale = math.sqrt(size) if flag("scale_embedding", get("scale_embedding")) else 1.0
        positions = lambda count: PositionsConfig(count, self.offset or 0, sinusoids=self.offset is None)
        embedding = EmbeddingConfig(
            plain.vocab_size, scale=scale, positions=positions(plain.max_position_embeddings), norm=norm
        )
        layer = self._layer(own.num_attention_heads, plain.dense.intermediate_size, act, size)
        cross = CrossConfig(own.num_attention_heads, own.head_dim, bias=True, key_bias=not self.frames)
        encoder = EncoderConfig((self._layer(heads, wide, act, size),) * depth, embedding, _NORM if self.pre else None)
        return ModelConfig(
            size, embedding, (dataclasses.replace(layer, cross=cross),) * plain.num_hidden_layers, _NORM,
            HeadConfig(plain.head.tied, bias=not self.frames, normed=self.pre), plain.max_position_embeddings,
            self._reading(get, encoder, positions),
        )  # fmt: skip

    def _layer(self, heads: int, wide: int, act: Any, size: int) -> LayerConfig:
        attention = AttentionConfig(
            heads, heads, size // heads, rope=None, qkv_bias=True, o_bias=True, k_bias=not self.frames
        )
        mlp = MLPConfig(wide, act, bias=True, gated=False)
        return LayerConfig(attention, mlp, _NORM, pre_norms=self.pre, sum_norms=not self.pre)

    def _reading(self, get: Fields, encoder: EncoderConfig, positions: Any) -> EncoderConfig:
        """The encoder with what it reads."""
        if not self.frames:
            separate = not flag("share_encoder_decoder_embeddings", get("share_encoder_decoder_embeddings"))
            most = get("max_position_embeddings")
            if not separate:
                return dataclasses.replace(encoder, longest=most)
            own = dataclasses.replace(encoder.embedding, vocab_size=get("source_vocab_size"))
            return dataclasses.replace(encoder, embedding=own, shared=False, longest=most)
        features, slots = get("num_mel_bins"), get("max_source_positions")
        if not is_size(features) or not is_size(slots):
            raise ModelError(
                "config.json: num_mel_bins and max_source_positions must be positive integers, not "
                f"{shown(features)} and {shown(slots)}"
            )
        own = dataclasses.replace(encoder.embedding, positions=positions(slots), scale=1.0)
        return dataclasses.replace(encoder, embedding=own, shared=False, frames=FramesConfig(features, slots))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """A model's fields."""
        encoder = config.encoder
        if encoder is None or not isinstance(encoder.layers[0].mixer, AttentionConfig):
            raise ModelError("BART has an encoder of attention")
        feed = encoder.layers[0].feed
        found = {
            "encoder_layers": len(encoder.layers), "encoder_ffn_dim": None if feed is None or feed.dense is None else
            feed.dense.intermediate_size, "encoder_attention_heads": encoder.layers[0].mixer.num_attention_heads,
            "scale_embedding": config.embedding.scale != 1.0, "is_encoder_decoder": True,
            "pad_token_id": min(self.pad, config.vocab_size - 1),
        }  # fmt: skip
        if encoder.frames is not None:
            return found | {
                "num_mel_bins": encoder.frames.features, "max_source_positions": encoder.frames.slots,
            }  # fmt: skip
        if self.offset is not None:
            return found
        return found | {
            "share_encoder_decoder_embeddings": encoder.shared, "source_vocab_size": encoder.embedding.vocab_size,
        }  # fmt: skip


_MODULES = {
    "input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj", "cross_norm": "encoder_attn_layer_norm",
    "cross_attn.o_proj": "encoder_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
} | {f"cross_attn.{name}_proj": f"encoder_attn.{name}_proj" for name in "qkv"}  # fmt: skip
_OUTER = {
    "model.layers": "layers", "model.norm": "layer_norm", "model.embed_norm": "layernorm_embedding",
    "model.embed_positions": "embed_positions", "model.embed_tokens": "embed_tokens", "frames.conv1": "conv1",
    "frames.conv2": "conv2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Bart(Family):
    def names_of(self, config: ModelConfig) -> weights.Names:
        """See `Family.names_of`; a table that both sides share has another name."""
        shared = config.encoder is not None and config.encoder.shared

        def named(name: str) -> str:
            if name == "lm_head.bias":
                return "final_logits_bias~"
            if name == "lm_head.weight":
                return name if config.head.bias else "proj_out.weight"
            if name == "model.embed_tokens.weight" and shared:
                return "model.shared.weight"
            side = "encoder" if name.startswith("encoder.") else "decoder"
            return f"model.{side}.{base.renamed(name.removeprefix('encoder.'), _MODULES, _OUTER)}"

        return named


def _text(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """With the bias of logits that some files leave out, and without computed positions and copies of a shared table."""
    encoder, found = config.encoder, dict(tensors)
    sides = ("model.encoder", "model.decoder")
    if config.embedding.positions is not None and config.embedding.positions.sinusoids:
        for side in sides:
            found.pop(f"{side}.embed_positions.weight", None)
    if encoder is not None and encoder.shared:
        copies = [found.pop(f"{side}.embed_tokens.weight", None) for side in sides]
        own = next((one for one in copies if one is not None), None)
        if "model.shared.weight" not in found and own is not None:
            found["model.shared.weight"] = own
    whole = any(name.endswith(("shared.weight", "embed_tokens.weight")) for name in found)  # an adapter has no tables
    if config.head.bias and whole and "final_logits_bias" not in found:
        found["final_logits_bias"] = zeros("final_logits_bias", (1, config.vocab_size))
    return found


def _family(kind: _Kind, model_type: str, architecture: str, usual: dict[str, Any], **changes: Any) -> Family:
    return _Bart(
        model_type, architecture,
        {
            "encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16, "num_hidden_layers": 12,
            "intermediate_size": 4096, "num_attention_heads": 16, "hidden_size": 1024, "hidden_act": "gelu",
            "scale_embedding": False, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "share_encoder_decoder_embeddings": True, "is_encoder_decoder": True, **usual,
        },
        kind.read, kind.write, {"is_encoder_decoder": (True,)} | changes.pop("fixed", {}), rope=None, text=_text,
        fields={
            "hidden_size": ("d_model",), "intermediate_size": ("decoder_ffn_dim",), "hidden_act": ("activation_function",),
            "num_attention_heads": ("decoder_attention_heads",), "num_hidden_layers": ("decoder_layers",),
            "rms_norm_eps": (), "num_key_value_heads": (), "head_dim": (), **changes.pop("fields", {}),
        },
        note="an encoder of another depth, width or number of heads, scaled embeddings (`scale_embedding`), the activation",
        **changes,
    )  # fmt: skip


BART = _family(_Kind(False, True, 2, 1), "bart", "BartForConditionalGeneration", {"vocab_size": 50265})
MBART = _family(_Kind(True, True, 2, 1), "mbart", "MBartForConditionalGeneration", {"vocab_size": 50265})
MARIAN = _family(
    _Kind(False, False, None, 58100), "marian", "MarianMTModel",
    {"source_vocab_size": 58101, "vocab_size": lambda get: get("source_vocab_size")},
    fields={"vocab_size": ("decoder_vocab_size",), "source_vocab_size": ("vocab_size",)},
)  # fmt: skip
WHISPER = _family(
    _Kind(True, False, 0, 50256, frames=True), "whisper", "WhisperForConditionalGeneration",
    {
        "vocab_size": 51865, "encoder_layers": 4, "encoder_ffn_dim": 1536, "encoder_attention_heads": 6,
        "num_hidden_layers": 4, "intermediate_size": 1536, "num_attention_heads": 6, "hidden_size": 384,
        "max_position_embeddings": 448, "num_mel_bins": 80, "max_source_positions": 1500,
    },
    fields={"max_position_embeddings": ("max_target_positions",)},
)  # fmt: skip
