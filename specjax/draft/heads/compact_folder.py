"""Draft models of few tokens on disk (`specjax.draft.compact`), in the layout of trained heads."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.draft.compact import CompactLM
from specjax.draft.head import check_ids
from specjax.draft.heads.folder import check_target, fitted, save_head, shipped_heads
from specjax.models.errors import ModelError
from specjax.models.fields import an_object
from specjax.models.json_file import read_json
from specjax.models.tensors import read_folder
from specjax.sharding.rules import placed, shardings

NAME = "draft"


def compact_folder(asked: str) -> Path | None:
    """The folder of a shipped name or path that holds a draft model of few tokens; None if it does not."""
    folder = shipped_heads().get(asked, Path(asked))
    file = folder / "config.json"
    return folder if file.is_file() and read_json(file).get("drafter") == NAME else None


def save_compact(folder: Path, lm: CompactLM, params: Any, target: Any, dtype: Any) -> None:
    """Writes a draft model with its `ids` for its target; see `specjax.draft.heads.folder.save_head`."""
    from specjax.models import hf_config

    save_head(folder, NAME, {"config": hf_config.to_hf(lm.lm.config)}, params, target, dtype)


def load_compact(title: str, folder: Path, target: Any, mesh: Any = None) -> tuple[CompactLM, Any]:
    """The model and its parameters in the target's type, or their shapes for a target without weights.

    Raises:
      ModelError: if it was made for another target, or a tensor is missing, misshapen or unknown.
    """
    from specjax.models import LlamaLM, hf_config

    config = read_json(folder / "config.json")
    check_target(title, folder / "config.json", an_object("target", config.get("target")), target)
    shape = an_object("config", an_object("fields", config.get("fields")).get("config"))
    lm = CompactLM(LlamaLM(hf_config.from_hf(shape)), vocab_size=target.lm.vocab_size)
    stored = read_folder(folder)
    if "ids" not in stored:
        raise ModelError(f"{title} does not fit: missing ids")
    ids = check_ids(stored.pop("ids").array(), lm.vocab_size)
    if len(ids) != lm.kept:
        raise ModelError(f"{title} lists {len(ids)} tokens, and its model has {lm.kept} besides the one for all others")
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = fitted(title, stored, jax.eval_shape(lm.init, key))
    params = {**jax.tree.map(lambda x: np.asarray(x).astype(target.dtype), params), "ids": ids}
    how = None if mesh is None else shardings(mesh, lm.axes(params), params, lm.axis_counts())
    if not target.abstract:
        return lm, jax.device_put(params, how)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return lm, shapes if how is None else placed(shapes, how)
