"""A GGUF file in the form of a folder for the loader: configuration, tokenizer and tensors."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.gguf import config, header, tensors, vocabulary
from specjax.models.tensors import Tensor

_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""The keys of `general.sampling.` that `generation_config.json` has too, under the latter's names."""


def described(file: Path) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The equivalents of `config.json` and `generation_config.json`, and a function that makes the tokenizer.

    Raises:
      ModelError: see `header.read` and `config.config`.
    """
    own = header.read(file)
    said = {name: own.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    short = {
        name: float(str(np.float32(x))) if isinstance(x, float) else x for name, x in said.items() if x is not None
    }
    fields = config.config(own) | short
    if ends := vocabulary.ends(own):
        fields["eos_token_id"] = ends
    return fields, functools.cache(lambda: vocabulary.tokenizer(own))


def read_tensors(file: Path, fields: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors under their Hugging Face names.

    Args:
      file: the model's file.
      fields: what `described` returned.
    """
    return tensors.tensors(header.read(file), fields)
