"""Vectors of compressed experts on disk: a folder of `config.json` and tensors, with the published keys and names.

A whole model with such experts is a folder of this kind, and so is one that holds nothing but the vectors.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.models import hf_config, loading, weights
from specjax.models.errors import ModelError
from specjax.models.model import resolve_dtype
from specjax.models.saving import beside
from specjax.models.tensors import read_folder


def save_vectors(folder: str | os.PathLike[str], lm: Any, vectors: Any, dtype: Any) -> None:
    """Writes vectors without the rest of a model.

    Args:
      folder: created where needed; older files of the same names are replaced.
      lm: the model that reads them, `specjax.models.routing.compressed`.
      vectors: as `specjax.models.routing.ones` makes them.
      dtype: the type to write.

    Raises:
      ModelError: if no family of files has such a model.
    """
    config = hf_config.to_hf(lm.config)
    with beside(Path(folder)) as scratch:
        weights.write(scratch / "model.safetensors", vectors, resolve_dtype(dtype))
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_vectors(asked: str, lm: Any, dtype: Any) -> tuple[int, Any]:
    """How many of a token's experts the vectors were trained beside, and the vectors, on the host.

    Args:
      asked: folder, shipped name or hub id; see above.
      lm: the target.
      dtype: their type.

    Raises:
      ModelError: if there is no such folder, or if it has no vectors or those of another model.
    """
    from specjax.models.routing import ones

    name, raw, _, file = loading.fields_of(asked)
    own = hf_config.from_hf(raw).experts
    if own is None or not own.vectors or not own.auxiliary:
        raise ModelError(
            f"{name} has no compressed experts (use_ce and n_ce in config.json): `specjax train compressed_experts` makes some"
        )
    tensors = read_folder(file.parent)
    leaves, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: ones(lm)))
    found = []
    for path, leaf in leaves:
        tensor = tensors.get(title := weights.hf_name(path)[0])
        if tensor is None or tensor.shape != leaf.shape:
            has = "it has none" if tensor is None else f"it has {list(tensor.shape)}"
            raise ModelError(
                f"{name} has vectors of another model: this one needs {title} {list(leaf.shape)}, and {has}"
            )
        found.append(np.asarray(tensor.array(), dtype))
    return own.main, jax.tree.unflatten(tree, found)
