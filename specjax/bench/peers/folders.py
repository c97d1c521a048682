"""Hugging Face folders for peers: the weights of the target and of a draft model."""

from pathlib import Path
from typing import Any

from specjax import models
from specjax.draft.compact import CompactLM
from specjax.draft.model import ModelDrafter
from specjax.models.llama import LlamaLM
from specjax.models.widening import untied


def target_folder(engine: Any, scratch: Path, widened: bool = False) -> Path:
    """The folder of the target's weights: its own, or a new one if it is a GGUF file, widened or has an adapter."""
    model = engine.model
    own = not widened and not model.adapter and model.path.is_dir()
    return model.path if own else written(model.lm, model.params, scratch)


def draft_of(engine: Any) -> tuple[LlamaLM, Any] | None:
    """An engine's draft model and its parameters, if it has one of the Llama family."""
    drafter = getattr(engine.decoder, "drafter", None)
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.lm, CompactLM):
        return drafter.lm.whole(engine.params["draft"])
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.lm, LlamaLM):
        return drafter.lm, engine.params["draft"]
    return None


def written(lm: LlamaLM, params: Any, folder: Path) -> Path:
    """Writes a model to a new folder; a divided head is written separately from the embedding."""
    models.save(folder, *untied(lm, params) if lm.config.head.logits_scaling != 1 else (lm, params))
    return folder
