"""MTP modules inside a target's folder (DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo), and those that speculators stores apart."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.draft.feature import layers_config
from specjax.draft.heads.layout import Reader, is_head
from specjax.models.errors import ModelError
from specjax.models.weights import extra_layer

_APART = re.compile(r"^(model\.)?mtp(_layers)?\.")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Names of a module's tensors.

    Attributes:
      name: whose layout it is.
      at: where the module's own tensors are.
      layer: where its decoder layer's are.
      embed_norm: of the embedding, below `at`; as are the next three.
      hidden_norm: of the feature.
      fc: over both.
      norm: before the head.
      hidden_first: whether `fc` reads the feature before the embedding.
    """

    name: str
    at: str
    layer: str
    embed_norm: str
    hidden_norm: str
    fc: str
    norm: str
    hidden_first: bool = False


def _layouts(layers: int) -> tuple[_Layout, ...]:
    last, fast = f"model.layers.{layers}", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return (
        _Layout("deepseek", last, last, "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        _Layout("qwen3-next", "mtp", "mtp.layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        _Layout("mimo", "model.mtp_layers.0", "model.mtp_layers.0", *fast, hidden_first=True),
        _Layout("speculators", "mtp_layers.0", "mtp_layers.0", *fast),
    )


def own_tensors(target: Any) -> Callable[[str], bool]:
    """Which tensors of a folder are an MTP module's, by name; the others are its target's."""
    layers = target.lm.num_layers
    return lambda name: bool(_APART.search(name)) or extra_layer(name, layers)


def mtp(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an MTP module, whose layer is one of its target's in all sizes.

    Raises:
      ModelError: where there is none, there are several, or its layer has experts.
    """
    layers = target.lm.num_layers
    known = _layouts(layers)
    found = next((x for x in known if f"{x.at}.{x.fc}.weight" in reader.tensors), None)
    if found is None:
        names = ", ".join(f"{x.at}.{x.fc}.weight" for x in known)
        raise ModelError(
            f"{reader.folder} has no MTP layer: looked for {names}; give a head's folder with model=FOLDER"
        )
    more = [n for n in reader.tensors if re.match(r"^(model\.)?mtp(_layers|\.layers)\.[1-9]", n)]
    if more or any(extra_layer(name, layers + 1) for name in reader.tensors):
        raise ModelError(f"{reader.folder} has several MTP layers, each for a token of its own; one is read")
    if any(".experts." in name or name.endswith(".mlp.gate.weight") for name in reader.tensors):
        raise ModelError(f"{reader.folder}: the MTP layer has experts; dense ones are read")
    reader.format = found.name
    return {}, _params(reader, found, target)


def _params(reader: Reader, names: _Layout, target: Any) -> dict[str, Any]:
    own = layers_config(target.lm, "mtp")
    size = own.hidden_size
    scale = lambda name: reader.scale(f"{names.at}.{name}", size)
    fc = reader.linear(f"{names.at}.{names.fc}", 2 * size, size)
    if names.hidden_first:
        fc = {"kernel": np.concatenate([fc["kernel"][size:], fc["kernel"][:size]])}
    layer = reader.layer(names.layer, own, size)
    reader.check_copy(f"{names.at}.embed_tokens.weight", target)
    return {
        "embed_norm": scale(names.embed_norm),
        "hidden_norm": scale(names.hidden_norm),
        "norm": scale(names.norm),
        "fc": fc,
        "layer": {**layer, "attention_norm": reader.scale(f"{names.layer}.input_layernorm", size)},
        **_head(reader, f"{names.at}.shared_head.head", size, target),
    }


def _head(reader: Reader, name: str, size: int, target: Any) -> dict[str, Any]:
    """A head of its own, where the file holds one that is no copy of the target's."""
    if f"{name}.weight" not in reader.tensors:
        return {}
    head = reader.linear(name, size, target.lm.vocab_size)
    if reader.problems or is_head(head["kernel"], target):
        return {}
    reader.notes.append("has a language-model head of its own")
    return {"head": head}
