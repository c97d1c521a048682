"""The small models of the table of drafters: a target, draft models, and targets of other kinds."""

import dataclasses

from support.shapes import changed

from specjax.models import AttentionConfig, EmbeddingConfig, LayerConfig, LlamaLM, MLPConfig, ModelConfig, llama_config
from specjax.models.cross import CrossConfig
from specjax.models.distances import DistancesConfig
from specjax.models.encoder import EncoderConfig
from specjax.models.experts import ExpertsConfig
from specjax.models.families import base
from specjax.models.latent import LatentAttentionConfig
from specjax.models.layer_inputs import LayerInputsConfig

CONFIG = llama_config(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
TARGET = LlamaLM(CONFIG)
DRAFT = LlamaLM(changed(CONFIG, num_hidden_layers=2))
DEEPER = LlamaLM(changed(CONFIG, num_hidden_layers=4))
"""A draft model with a group of layers between the first and the last."""


def _sharing() -> ModelConfig:
    """Layers that share keys and values, of two kinds of heads, with inputs of their own and MLPs that are wider."""
    plain = changed(
        CONFIG, num_hidden_layers=4, sliding_window=5, sliding_layers=(False, True) * 2, post_norms=True,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    heads = {False: {"head_dim": 16, "num_key_value_heads": 2}, True: {}}
    plain = base.mixers(plain, lambda i: heads[i % 2 > 0] | {"source": i - 2 if i > 1 else None})

    def change(i: int, layer: LayerConfig) -> LayerConfig:
        return dataclasses.replace(layer, scalar=True, input_size=6, feed=MLPConfig(256 if i > 1 else 128))

    return plain.each(change).every(EmbeddingConfig, layer_inputs=LayerInputsConfig(6, 96))


def _latent() -> ModelConfig:
    """Latent attention in every layer, in whose cache a token has one vector."""
    mixer = LatentAttentionConfig(
        num_attention_heads=8, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, q_lora_rank=24
    )
    return CONFIG.each(lambda i, layer: dataclasses.replace(layer, mixer=mixer))


def _encoding() -> ModelConfig:
    """Two layers that read a source from both sides, and scores by distance on either side."""
    plain = CONFIG.every(AttentionConfig, rope=None, distances=True)
    distances = DistancesConfig(8, 8, 20)
    own = EncoderConfig(
        plain.layers[:2], plain.embedding, plain.norm, distances=dataclasses.replace(distances, both_ways=True)
    )
    crossed = plain.each(lambda i, layer: dataclasses.replace(layer, cross=CrossConfig(8, 8, bias=i == 1)))
    return dataclasses.replace(crossed, encoder=own, distances=distances)


MODELS: dict[str, LlamaLM] = {
    "experts": LlamaLM(
        changed(
            CONFIG,
            qk_norm=True,
            experts=ExpertsConfig(4, 2, 32, scoring="sigmoid", n_group=2, topk_group=1, shared=MLPConfig(32)),
            sparse_layers=(False, True, True),
        )
    ),
    "sinks": LlamaLM(
        changed(
            CONFIG,
            num_hidden_layers=2,
            sliding_window=7,
            sliding_layers=(True, False),
            attention_sinks=True,
            o_bias=True,
            experts=ExpertsConfig(4, 2, 32, scoring="chosen", swiglu_limit=1.0),
        )
    ),
    "shared": LlamaLM(_sharing()),
    "latent": LlamaLM(_latent()),
    "encoder": LlamaLM(_encoding()),
}
"""GLM-4.5's kind, gpt-oss's, that of the small Gemma 4, DeepSeek's, and T5's."""
