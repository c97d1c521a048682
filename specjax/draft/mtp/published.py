"""MTP modules inside a target's folder (DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo, MiMo-V2), and those that speculators stores
apart."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.draft.feature import layers_config
from specjax.draft.heads.layout import Layout, Reader, Sure, is_head, named
from specjax.draft.mtp import own_layers
from specjax.models import hf_config, weights
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.families import base
from specjax.models.fields import is_size
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields in which a target's file says how many modules it holds."""
_APART = re.compile(r"^(model\.)?mtp(_layers)?\.")


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of a module's tensors.

    Attributes:
      name: of the layout.
      at: where the module's own tensors are.
      layer: where its decoder layer's are.
      embed_norm: of the embedding, below `at`, like the next three.
      hidden_norm: of the feature.
      fc: over both.
      norm: before the head.
      hidden_first: whether `fc` reads the feature before the embedding.
      final_norm: whether features are read after the target's final norm.
      several: whether there may be several modules, with the layers of the target that have a window, but without experts;
        `{}` in `at` and `layer` is their number.
      mlp_norm: of the layer, before its MLP.
    """

    name: str
    at: str
    layer: str
    embed_norm: str
    hidden_norm: str
    fc: str
    norm: str
    hidden_first: bool = False
    final_norm: bool = True
    several: bool = False
    mlp_norm: str = "post_attention_layernorm"

    def of(self, i: int) -> "_Names":
        """The names of module i."""
        return dataclasses.replace(self, at=self.at.format(i), layer=self.layer.format(i))


def _layouts(layers: int) -> tuple[_Names, ...]:
    last, fast = f"model.layers.{layers}", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return (
        _Names("deepseek", last, last, "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        _Names("qwen3-next", "mtp", "mtp.layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        _Names("mimo", "model.mtp_layers.0", "model.mtp_layers.0", *fast, hidden_first=True, final_norm=False),
        _Names("speculators", "mtp_layers.0", "mtp_layers.0", *fast),
        _Names(
            "mimo-v2", "model.mtp.layers.{}", "model.mtp.layers.{}", "enorm", "hnorm", "eh_proj", "final_layernorm",
            several=True, mlp_norm="pre_mlp_layernorm",
        ),
    )  # fmt: skip


def _own_tensors(target: Any) -> Callable[[str], bool]:
    """Which tensors of a folder are an MTP module's, by name; the others are its target's."""
    layers = target.lm.num_layers
    return lambda name: bool(_APART.search(name)) or weights.extra_layer(name, layers)


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an MTP module; its layer has the sizes and names of its target's layers, with experts or not.

    Raises:
      ModelError: if there is none, or there are several in a layout of one.
    """
    layers = target.lm.num_layers
    known = [x.of(0) for x in _layouts(layers)]
    found = next((x for x in known if f"{x.at}.{x.fc}.weight" in reader.tensors), None)
    if found is None:
        names = ", ".join(f"{x.at}.{x.fc}.weight" for x in known)
        raise ModelError(
            f"{reader.folder} has no MTP layer: looked for {names}; give a head's folder with model=FOLDER"
        )
    reader.format = found.name
    if found.several:
        return _several(reader, next(x for x in _layouts(layers) if x.name == found.name), target)
    more = [n for n in reader.tensors if re.match(r"^(model\.)?mtp(_layers|\.layers)\.[1-9]", n)]
    if more or any(weights.extra_layer(name, layers + 1) for name in reader.tensors):
        raise ModelError(f"{reader.folder} has several MTP layers, each for another token; only one is supported")
    reader.tensors = _each_expert(reader.tensors, found.layer)
    of_target, sparse = target.lm.config, any(name.startswith(f"{found.layer}.mlp.experts.") for name in reader.tensors)
    experts = next((layer.feed for layer in of_target.layers if isinstance(layer.feed, ExpertsConfig)), None)
    if sparse and experts is None:
        raise ModelError(f"{reader.folder}: the MTP layer has experts, and {target.name!r} has none of that kind")
    own = own_layers(target.lm).every(NormConfig, kind=of_target.norm.kind)
    own = own.every(AttentionConfig, gated=of_target.near.gated)
    own = own if not sparse or experts is None else base.sparse(own, experts)
    final_norm = reader.chosen.get("final_norm", found.final_norm)
    if not final_norm:
        reader.notes.append("reads the target's features before its final norm, as MiMo's; final_norm=true: after")
    return {"config": own, "final_norm": final_norm}, _params(reader, found, own, target)


def _each_expert(tensors: dict[str, np.ndarray], layer: str) -> dict[str, np.ndarray]:
    """The tensors with the layer's experts one by one, where a file joins them: `gate_up_proj` `[X, 2 F, E]` and `down_proj`
    `[X, E, F]`."""
    made = dict(tensors)
    for kind, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        for i, whole in enumerate(made.pop(f"{layer}.mlp.experts.{kind}_proj", ())):
            own = zip(parts, np.split(whole, len(parts)), strict=True)
            made |= {f"{layer}.mlp.experts.{i}.{part}_proj.weight": x for part, x in own}
    return made


def _several(reader: Reader, names: _Names, target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of MiMo-V2's modules."""
    of_target, count = target.lm.config, 0
    while f"{names.of(count).at}.{names.fc}.weight" in reader.tensors:
        count += 1
    near = next((layer for layer in of_target.layers if getattr(layer.mixer, "window", None) is not None), None)
    if near is None:
        raise ModelError(
            f"{reader.folder}: its MTP layers are layers with a window, and {target.name!r} has none of that kind"
        )
    layer = dataclasses.replace(near, feed=of_target.dense)
    own = dataclasses.replace(layers_config(target.lm, "mtp", count), layers=(layer,) * count)
    own = own.every(NormConfig, kind=of_target.norm.kind)
    made = [_params(reader, names.of(i), own, target) for i in range(count)]
    return {"config": own}, made[0] if count == 1 else {"modules": dict(enumerate(made))}


def _params(reader: Reader, names: _Names, own: ModelConfig, target: Any) -> dict[str, Any]:
    size = own.hidden_size
    scale = lambda name: reader.scale(f"{names.at}.{name}", size)
    fc = reader.linear(f"{names.at}.{names.fc}", 2 * size, size)
    if names.hidden_first:
        fc = {"kernel": np.concatenate([fc["kernel"][size:], fc["kernel"][:size]])}
    layer = _layer(reader, names, own, target)
    reader.check_copy(f"{names.at}.embed_tokens.weight", target)
    return {
        "embed_norm": scale(names.embed_norm),
        "hidden_norm": scale(names.hidden_norm),
        "norm": scale(names.norm),
        "fc": fc,
        "layer": layer,
        **_head(reader, f"{names.at}.shared_head.head", size, target),
    }


def _layer(reader: Reader, names: _Names, own: ModelConfig, target: Any) -> Any:
    """The decoder layer, whose tensors have the names of its target's."""
    make = lambda: own.layers[0].build(own.hidden_size, jnp.float32, nnx.Rngs(0))
    abstract = {"layers": {0: nnx.to_pure_dict(nnx.split(nnx.eval_shape(make))[1])}}
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    family = hf_config.family_of(hf_config.to_hf(target.lm.config))
    found: list[list[np.ndarray]] = [[] for _ in leaves]
    for name, parts in weights.stored_parts(leaves, family.names_of(own), family.layout).items():
        name = name.replace("post_attention_layernorm", names.mlp_norm)
        whole = reader.take(names.layer + name.removeprefix("model.layers.0"), weights.shape_of(parts))
        for part, rows in zip(parts, weights.cut_array(whole, parts), strict=True):
            array = part.ours(rows)
            found[part.leaf].append(array.T if part.transposed else array)
    whole = [np.stack(own) if leaf.ndim > own[0].ndim else own[0] for own, (_, leaf) in zip(found, leaves, strict=True)]
    return jax.tree.unflatten(tree, whole)["layers"][0]


def _head(reader: Reader, name: str, size: int, target: Any) -> dict[str, Any]:
    """The module's own head, if the file holds one that is not a copy of the target's."""
    if f"{name}.weight" not in reader.tensors:
        return {}
    head = reader.linear(name, size, target.lm.vocab_size)
    if reader.problems or is_head(head["kernel"], target):
        return {}
    reader.notes.append("has a language-model head of its own")
    return {"head": head}


def _said(config: Mapping[str, Any]) -> Sure:
    if named(config, "mtp"):
        return Sure.NAMED
    text = config.get("text_config")
    fields = dict(config) | (text if isinstance(text, dict) else {})
    return Sure.OF_TARGET if any(is_size(fields.get(name)) for name in _COUNTS) else Sure.NO


LAYOUT = Layout(
    read,
    said=_said,
    what="a layer of its target's class",
    beside=("deepseek", "moe"),
    keep=_own_tensors,
)
