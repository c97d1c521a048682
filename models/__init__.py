"""Models behind the `specjax.lm.LM` contract, and `load` and `save` for Hugging Face folders.

Everything is imported on first use: `import specjax.models` alone loads neither flax nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.models.errors import ModelError
    from specjax.models.hub import Model, load, resolve_dtype, save, shipped
    from specjax.models.llama import LlamaConfig, LlamaLM, RopeScaling
    from specjax.models.tabular import TabularLM

_HOME = {
    "ModelError": "errors",
    "Model": "hub",
    "load": "hub",
    "resolve_dtype": "hub",
    "save": "hub",
    "shipped": "hub",
    "LlamaConfig": "llama",
    "LlamaLM": "llama",
    "RopeScaling": "llama",
    "TabularLM": "tabular",
}

__all__ = [
    "LlamaConfig",
    "LlamaLM",
    "Model",
    "ModelError",
    "RopeScaling",
    "TabularLM",
    "load",
    "resolve_dtype",
    "save",
    "shipped",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"specjax.models.{_HOME[name]}"), name)
