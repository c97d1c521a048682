"""What is written for peers to read: the target's and a draft model's weights as Hugging Face folders."""

from pathlib import Path
from typing import Any

from specjax import models
from specjax.draft.model import ModelDrafter
from specjax.models.llama import LlamaLM
from specjax.models.widening import untied


def target_folder(engine: Any, scratch: Path, widened: bool = False) -> Path:
    """Where the target's weights lie: its own folder; of a GGUF file, widened or with an adapter a new one."""
    model = engine.model
    own = not widened and not model.adapter and model.path.is_dir()
    return model.path if own else written(model.lm, model.params, scratch)


def draft_of(engine: Any) -> tuple[LlamaLM, Any] | None:
    """An engine's draft model and its parameters, where it has one of Llama's family."""
    drafter = getattr(engine.decoder, "drafter", None)
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.lm, LlamaLM):
        return drafter.lm, engine.params["draft"]
    return None


def written(lm: LlamaLM, params: Any, folder: Path) -> Path:
    """A new folder with a model in it; a divided head is written apart from the embedding."""
    models.save(folder, *untied(lm, params) if lm.config.head.logits_scaling != 1 else (lm, params))
    return folder
