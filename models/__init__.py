"""Models that keep the `specjax.lm.LM` contract, and `load` and `save` for Hugging Face folders.

Everything is imported on first use: `import specjax.models` alone loads neither flax nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specjax.models.default import DEFAULT_MODEL

if TYPE_CHECKING:
    from specjax.models.attention import AttentionConfig
    from specjax.models.diffusion_gemma import DiffusionGemmaLM
    from specjax.models.errors import ModelError
    from specjax.models.experts import ExpertsConfig
    from specjax.models.from_function import FunctionLM
    from specjax.models.gemma_config import DiffusionGemmaConfig
    from specjax.models.hub import shipped
    from specjax.models.latent import LatentAttentionConfig
    from specjax.models.layer import LayerConfig
    from specjax.models.llama import LlamaLM
    from specjax.models.loading import abstract, load
    from specjax.models.mapped import Mapped, of_library
    from specjax.models.masked import Canvas, Gaps, Masked
    from specjax.models.mixers import Mixer, MixerConfig, StateMixerConfig
    from specjax.models.mlp import MLPConfig
    from specjax.models.model import Model, cached, quantised, reduced, resolve_dtype, retyped
    from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig, PositionsConfig, llama_config
    from specjax.models.norms import NormConfig
    from specjax.models.placement import spread
    from specjax.models.ropes import RopeConfig, RopeScaling
    from specjax.models.saving import save
    from specjax.models.tabular import TabularLM
    from specjax.models.transform import TransformConfig
    from specjax.models.widening import widen

_HOME = {
    "Canvas": "masked",
    "DiffusionGemmaConfig": "gemma_config",
    "DiffusionGemmaLM": "diffusion_gemma",
    "ExpertsConfig": "experts",
    "FunctionLM": "from_function",
    "Gaps": "masked",
    "ModelError": "errors",
    "Model": "model",
    "abstract": "loading",
    "cached": "model",
    "load": "loading",
    "quantised": "model",
    "reduced": "model",
    "resolve_dtype": "model",
    "retyped": "model",
    "save": "saving",
    "shipped": "hub",
    "spread": "placement",
    "AttentionConfig": "attention",
    "LatentAttentionConfig": "latent",
    "EmbeddingConfig": "model_config",
    "HeadConfig": "model_config",
    "LayerConfig": "layer",
    "LlamaLM": "llama",
    "Mapped": "mapped",
    "Masked": "masked",
    "Mixer": "mixers",
    "MixerConfig": "mixers",
    "MLPConfig": "mlp",
    "ModelConfig": "model_config",
    "NormConfig": "norms",
    "PositionsConfig": "model_config",
    "RopeConfig": "ropes",
    "RopeScaling": "ropes",
    "StateMixerConfig": "mixers",
    "TabularLM": "tabular",
    "TransformConfig": "transform",
    "llama_config": "model_config",
    "of_library": "mapped",
    "widen": "widening",
}

__all__ = [
    "DEFAULT_MODEL",
    "AttentionConfig",
    "Canvas",
    "DiffusionGemmaConfig",
    "DiffusionGemmaLM",
    "EmbeddingConfig",
    "ExpertsConfig",
    "FunctionLM",
    "Gaps",
    "HeadConfig",
    "LatentAttentionConfig",
    "LayerConfig",
    "LlamaLM",
    "MLPConfig",
    "Mapped",
    "Masked",
    "Mixer",
    "MixerConfig",
    "Model",
    "ModelConfig",
    "ModelError",
    "NormConfig",
    "PositionsConfig",
    "RopeConfig",
    "RopeScaling",
    "StateMixerConfig",
    "TabularLM",
    "TransformConfig",
    "abstract",
    "cached",
    "llama_config",
    "load",
    "of_library",
    "quantised",
    "reduced",
    "resolve_dtype",
    "retyped",
    "save",
    "shipped",
    "spread",
    "widen",
]


if not TYPE_CHECKING:  # or any name would do

    def __dir__() -> list[str]:
        return sorted(__all__)

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"specjax.models.{_HOME[name]}"), name)
