"""The published layout of EAGLE-1 and EAGLE-2 (SafeAILab/EAGLE), and what is common to those of its descendants."""

from collections.abc import Collection
from typing import Any

import numpy as np

from specjax.draft.heads.layout import Layout, Reader, check_flags, check_width, layer_config
from specjax.models.errors import ModelError


def layer_of(reader: Reader, config: dict[str, Any], target: Any, *known: str) -> Any:
    """The `ModelConfig` of a head's one layer, of the target's width; a file's copy of the embedding is checked.

    The flags `known` are read by the caller.

    Raises:
      ModelError: for another width, vocabulary, embedding or number of layers, and for unknown flags.
    """
    check_flags(reader, config, "bias", *known)
    own = layer_config(reader, config, target)
    check_width(reader, own.hidden_size, target)
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelError(
            f"{reader.file}: num_hidden_layers is {config['num_hidden_layers']}; only heads of one layer are supported"
        )
    reader.check_copy("embed_tokens.weight", target)
    return own


def layers_of(reader: Reader, own: Any) -> dict[str, Any]:
    """The parameters of a head's layers, `layers.0` and on: its first has no norm before attention, and all others do."""
    size = own.hidden_size
    params: dict[str, Any] = {"layer": reader.layer("layers.0", own, size)}
    later = [f"layers.{i}" for i in range(1, own.num_hidden_layers)]
    norm = lambda at: {"attention_norm": reader.scale(f"{at}.input_layernorm", size)}
    return params | (
        {"more": {i: {**reader.layer(at, own, size), **norm(at)} for i, at in enumerate(later)}} if later else {}
    )


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an EAGLE-1 or EAGLE-2 head."""
    own = layer_of(reader, config, target)
    size = own.hidden_size
    fc = reader.linear("fc", 2 * size, size, bias=config.get("bias", True))
    fc.setdefault("bias", np.zeros((size,), np.float32))
    return {"config": own}, {"fc": fc, "layer": reader.layer("layers.0", own, size)}


def _held(names: Collection[str]) -> bool:
    others = any(
        name.endswith("hidden_norm.weight") or name.startswith("mlp.") for name in names
    )  # EAGLE-3's, Gumiho's
    return "fc.weight" in names and not others


LAYOUT = Layout(read, held=_held)
