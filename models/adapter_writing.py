"""Writes trained changes (`specjax.models.lora`) as a LoRA adapter that PEFT and `specjax.models.adapters` read.

A file may hold several of our matrices as one, such as the queries, keys and values of Phi-3. There A has the ranks of all
of them, one after the other, and each one's outputs have zeros in B for the ranks of the others.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.models import weights
from specjax.models.errors import ModelError
from specjax.models.lora import is_pair
from specjax.models.saving import beside
from specjax.models.weights import Layout, Names, Part, listed, stored_parts

PyTree = Any


def stored_changes(changes: PyTree, params: PyTree, names: Names, layout: Layout) -> dict[str, list[Part]]:
    """The parts of every tensor that changes, by the tensor's name; their `leaf` is the number of a pair of matrices.

    Args:
      changes: see `specjax.models.lora`; arrays or shapes.
      params: of the model; arrays or shapes.
      names: see `specjax.models.weights.Names`.
      layout: see `specjax.models.weights.Layout`.

    Raises:
      ModelError: naming tensors that an adapter cannot change as they are stored.
    """
    kernel = jax.tree_util.DictKey("kernel")
    pairs = jax.tree_util.tree_flatten_with_path(changes, is_leaf=is_pair)[0]
    shape = lambda pair: jax.ShapeDtypeStruct((pair["a"].shape[1], pair["b"].shape[0]), pair["a"].dtype)
    found = stored_parts([((*path, kernel), shape(pair)) for path, pair in pairs], names, layout)
    every = stored_parts(jax.tree_util.tree_flatten_with_path(params)[0], names, layout)
    plain = lambda part: part.transposed and part.index is None and not part.each and not part.unit
    odd = [name for name, own in found.items() if len(own) != len(every[name]) or not all(map(plain, own))]
    if odd:
        raise ModelError(f"a LoRA adapter cannot change these tensors as they are stored: {listed(odd)}")
    return found


def write(
    folder: Path, changes: PyTree, stored: dict[str, list[Part]], rank: int, alpha: float, base: str, dtype: Any
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`.

    Args:
      folder: created if needed; files of an older adapter in it are replaced.
      changes: see `specjax.models.lora`; numpy arrays.
      stored: from `stored_changes`.
      rank: r.
      alpha: the scale of the changes times r.
      base: the name of the model that they belong to.
      dtype: the type to write.
    """
    pairs = jax.tree.leaves(changes, is_leaf=is_pair)
    arrays, several = {}, {}
    for name, parts in sorted(stored.items()):
        module = name.removesuffix(".weight")
        for letter, matrix in zip("AB", _matrices(pairs, parts, rank), strict=True):
            arrays[f"base_model.model.{module}.lora_{letter}.weight"] = np.asarray(matrix, dtype, order="C")
        if len(parts) > 1:
            several[module] = len(parts)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [name.removesuffix(".weight") for name in sorted(stored)],
        "rank_pattern": {module: count * rank for module, count in several.items()},
        "alpha_pattern": {module: count * alpha for module, count in several.items()},
    }
    with beside(folder) as scratch:
        weights.write_arrays(scratch / "adapter_model.safetensors", arrays)
        (scratch / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _matrices(pairs: list[Any], parts: list[Part], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a tensor with these parts."""
    a = np.concatenate([pairs[part.leaf]["a"] for part in parts])
    outputs = []
    for number, part in enumerate(parts):
        b = np.asarray(pairs[part.leaf]["b"])
        wide = np.zeros((len(b), len(a)), b.dtype)
        wide[:, number * rank : (number + 1) * rank] = b if part.pairs is None else part.pairs.joined(b)
        outputs.append(wide)
    shaped = [dataclasses.replace(part, shape=own.shape) for part, own in zip(parts, outputs, strict=True)]
    return a, weights.joined(outputs, shaped)
