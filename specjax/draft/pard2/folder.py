"""A PARD-2 model on disk, as AMD writes it: a PARD model's folder that also says what is read of the target.

`config.json` has `pard2_target_layers`, `pard2_target_dim`, `pard2_scale` and `pard2_proj_bias`. The projection
(`target_proj.weight` `[E, F]`, `target_proj.bias`) is in a separate file, which AMD writes in torch's format.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from specjax.draft.heads.files import read_tensors, torch_files
from specjax.draft.masks_on_disk import PARD, config_of
from specjax.draft.pard2.features import Joined
from specjax.models import hub
from specjax.models.errors import ModelError
from specjax.models.fields import is_size

STEM = "warp_model"
"""The name of the file with the projection."""
_LAYERS, _SIZE, _SCALE, _BIAS = "pard2_target_layers", "pard2_target_dim", "pard2_scale", "pard2_proj_bias"


def is_joined(draft: Any) -> bool:
    """Whether a loaded draft model's folder says that it reads a target's features."""
    return config_of(draft)[1].get(_LAYERS) is not None


def read_joined(asked: str, draft: Any, target: Any) -> tuple[Joined, dict[str, Any]]:
    """What a loaded draft model reads of the target, and the projection: arrays, or shapes if it has no weights.

    Args:
      asked: the draft model's folder, shipped name or hub id, from which the projection is fetched.
      draft: the draft model.
      target: the target.

    Raises:
      ModelError: if its folder does not say it, or says it of another target.
    """
    file, config = config_of(draft)
    layers, scale = config.get(_LAYERS), config.get(_SCALE, Joined.scale)
    if layers is None:
        raise ModelError(
            f"{draft.name!r} names no layers of a target ({_LAYERS} in config.json): `specjax train pard2` makes a PARD-2 "
            "model of it, and `pard` reads models without features"
        )
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise ModelError(f"{file}: {_LAYERS} must be a list of layers, not {layers!r}")
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ModelError(f"{file}: {_SCALE} must be a number, not {scale!r}")
    try:
        joined = Joined(tuple(layers), float(scale), bool(config.get(_BIAS, False))).of(target.lm.num_layers)
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error
    size = target.lm.config.hidden_size * len(layers)
    if is_size(config.get(_SIZE)) and config[_SIZE] != size:
        raise ModelError(
            f"{file}: {_SIZE} is {config[_SIZE]}, and {len(layers)} layers of {target.name!r} have {size} features: pick the "
            "model that was trained for this target"
        )
    return joined, _projection(asked, draft, joined, size)


def _projection(asked: str, draft: Any, joined: Joined, size: int) -> dict[str, Any]:
    shapes = {"kernel": (size, draft.lm.config.hidden_size), "bias": (draft.lm.config.hidden_size,)}
    shapes = {name: shape for name, shape in shapes.items() if name == "kernel" or joined.bias}
    if draft.abstract:
        return {name: jax.ShapeDtypeStruct(shape, draft.dtype) for name, shape in shapes.items()}
    folder = hub.find(asked, hub.shipped(), "model", (STEM,), torch_files((STEM,)))[1]
    tensors = read_tensors(folder, (STEM,))
    made = {}
    for name, shape in shapes.items():
        stored = tensors.get("target_proj.weight" if name == "kernel" else "target_proj.bias")
        found = None if stored is None else stored.T.shape
        if stored is None or found != shape:
            raise ModelError(
                f"{draft.path}: the projection's {name} must have the shape {shape}, and its file has {found or 'none'}"
            )
        made[name] = jnp.asarray(np.ascontiguousarray(stored.T), draft.dtype)
    return made


def joined_fields(mask: int, joined: Joined, size: int) -> dict[str, Any]:
    """The fields of `config.json` that describe a PARD-2 model, as AMD writes them.

    Args:
      mask: the id of the mask.
      joined: what is read of the target.
      size: F, of the joined features.
    """
    own = {_LAYERS: list(joined.target_layers), _SIZE: size, _SCALE: joined.scale, _BIAS: joined.bias}
    return {PARD: mask, "spd_type": "pard2", "pard2": True, **own}


def write_projection(folder: Path, fc: Mapping[str, Any], dtype: Any) -> None:
    """Writes the projection beside a model, in safetensors.

    Args:
      folder: of the model.
      fc: `kernel` `[F, E]`, and `bias` `[E]` if it has one.
      dtype: to write in.
    """
    names = {"kernel": "target_proj.weight", "bias": "target_proj.bias"}
    tensors = {names[name]: np.ascontiguousarray(np.asarray(x).astype(dtype).T) for name, x in fc.items()}
    save_file(tensors, folder / f"{STEM}.safetensors", {"format": "pt"})
