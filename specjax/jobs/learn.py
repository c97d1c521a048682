"""`specjax generate --learn FOLDER`: a job's draft model learns from the target's corrections (arXiv:2310.07177)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import models
from specjax.assembly.registry import build_drafter, build_verifier, tree_of
from specjax.decode import Speculate
from specjax.draft import ModelDrafter
from specjax.jobs.options import JobOptions
from specjax.models import LlamaLM
from specjax.serve.online import OnlineEngine

LEARNT = "learnt.safetensors"
"""The file of a folder with what learning needs to go on; the draft model is beside it."""


class LearningEngine(OnlineEngine):
    """An `OnlineEngine` that keeps what its draft learns in a folder, after every update.

    A killed job loses the lessons of at most `interval` texts and those that ran; no text depends on them.

    Attributes:
      folder: where; after `keep` it is a model that `draft:model=FOLDER` takes.
    """

    def __init__(self, folder: Path, model: Any, draft: Any, drafter: ModelDrafter, **options: Any):
        super().__init__(model, draft, drafter.expander, **options)
        self.folder, self._draft = folder, draft
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / LEARNT).exists():
            self.resume(folder / LEARNT)

    def _learn(self, tokens: np.ndarray, missed: np.ndarray) -> None:
        super()._learn(tokens, missed)
        self.save(self.folder / LEARNT)

    def keep(self) -> None:
        """Writes what was learnt, and the draft model in its own type."""
        self.save(self.folder / LEARNT)
        draft = self._draft
        models.save(
            self.folder, draft.lm, self.draft_params, draft.dtype_name, draft.tokenizer, draft.eos_ids,
            generation=draft.generation,
        )  # fmt: skip


def check_learns(options: JobOptions) -> None:
    """Raises ValueError if the options of a job with `learn` name no draft model, or several processes."""
    if options.ray is not None or options.distributed or options.coordinator is not None:
        raise ValueError("--learn is for a job of one process: leave --ray, --distributed and --coordinator out")
    way = options.way
    if not isinstance(way, Speculate) or not isinstance(way.drafter, str):
        raise ValueError(
            "--learn teaches a draft model: name it, such as --drafter draft or --drafter draft:model=FOLDER"
        )


def learning_engine(options: JobOptions, model: Any, **how: Any) -> LearningEngine:
    """The engine of a job with `learn`.

    Args:
      options: of the job.
      model: the loaded target.
      **how: options of `Engine`.

    Raises:
      ValueError: if its drafter is no draft model of the target's own tokens, the verifier's text depends on drafts, or the
        folder holds another model or has learnt for another draft.
    """
    way, folder = options.way, Path(options.learn or "")
    assert isinstance(way, Speculate) and isinstance(way.drafter, str)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--learn {options.learn!r} is a file: name a folder")
    if (folder / "config.json").exists() and not (folder / LEARNT).exists():
        raise ValueError(f"--learn {options.learn!r} holds a model that would be replaced: name another folder")
    verifier, _ = build_verifier(way.verifier, model)
    if verifier.text_follows_draft:
        raise ValueError(
            "--learn keeps the text only where it does not depend on the draft: leave the verifier out, or choose coupled"
        )
    drafter, params = build_drafter(way.drafter, model, mesh=how.get("mesh"), tree=tree_of(verifier))
    if type(drafter) is not ModelDrafter or not isinstance(drafter.lm, LlamaLM):
        raise ValueError(
            f"--learn teaches a draft model with the target's tokens, and {way.drafter!r} is none: give "
            "--drafter draft:model=FOLDER"
        )
    kind = jax.tree.leaves(params)[0].dtype
    draft = dataclasses.replace(
        model, lm=drafter.lm, params=params, dtype=np.dtype(kind), name=folder.name, generation={}
    )
    return LearningEngine(folder, model, draft, drafter, decode=way, **how)
