"""What is written for peers to read: the target's and a draft model's weights as Hugging Face folders."""

from pathlib import Path
from typing import Any

from specjax import models
from specjax.bench.options import BenchOptions
from specjax.draft.model import ModelDrafter
from specjax.models.llama import LlamaLM
from specjax.models.widening import untied


def target_folder(engine: Any, options: BenchOptions, scratch: Path) -> Path:
    """Where the target's weights lie: its own folder, or where it was widened or is no folder (GGUF) a new one."""
    own = options.widen is None and engine.model.path.is_dir()
    return engine.model.path if own else written(engine.model.lm, engine.model.params, scratch)


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
