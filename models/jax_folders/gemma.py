"""The layout of the library `gemma` (github.com/google-deepmind/gemma): Gemma 1, 2 and 3.

Names are flat (`transformer/layer_0/attn/q_einsum`, then `w`), nested, or with layers of one kind on the first axis
(`transformer/stacked_layers/attention_type_1/...`).
"""

import re
from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.jax_folders.part import Named, Part, Shapes, check_layers, layer_of
from specjax.models.model_config import ModelConfig

NAME = "the library gemma"
FAMILIES = ("gemma", "gemma2", "gemma3_text")
"""The families that are read, by `model_type`."""
EMBEDDING = "embedder/input_embedding"
"""The table of embeddings; its rows may be padded."""
_OUTER = {"embed.embedding": EMBEDDING, "norm.scale": "final_norm/scale"}
_IN_LAYERS = {
    "attention_norm.scale": "pre_attention_norm/scale", "attention_post_norm.scale": "post_attention_norm/scale",
    "mlp_norm.scale": "pre_ffw_norm/scale", "mlp_post_norm.scale": "post_ffw_norm/scale",
    "attention.q_norm.scale": "attn/_query_norm/scale", "attention.k_norm.scale": "attn/_key_norm/scale",
    "attention.o.kernel": "attn/attn_vec_einsum", "mlp.down.kernel": "mlp/linear",
}  # fmt: skip
_GATING = {"mlp.gate.kernel": 0, "mlp.up.kernel": 1}
_JOINED = {"attention.q.kernel": 0, "attention.k.kernel": 1, "attention.v.kernel": 2}
_STACKED = re.compile(r"stacked_layers/attention_type_(\d+)/(.+)")

Take = Callable[[Any], Any]


def is_one(names: Any) -> bool:
    """Whether these are the names of a checkpoint in this layout."""
    return EMBEDDING in names


def is_unread(name: str) -> bool:
    """Whether an array belongs to no text model."""
    return name.startswith(("SigLiPFromPatches_0/", "vision_encoder/", "embedder/mm_"))


def as_stored(config: ModelConfig) -> ModelConfig:
    """The model whose parameters are the library's numbers: the same."""
    return config


def parts(shapes: Shapes, wanted: Named, config: ModelConfig) -> dict[str, Part]:
    """Where each parameter is, by its name; see `specjax.models.jax_folders.maxtext.parts`."""
    if config.family not in FAMILIES:
        raise ModelError(f"this checkpoint is of {', '.join(FAMILIES)}, and its config.json of {config.family!r}")
    kinds = 1 + max((int(match[1]) for name in shapes if (match := _STACKED.fullmatch(name))), default=-1)
    if kinds:
        of_kind = {match[1]: shape[0] for name, shape in shapes.items() if (match := _STACKED.fullmatch(name))}
        check_layers(sum(of_kind.values()), config.num_hidden_layers)
    found = {}
    for name, shape in wanted.items():
        layer, own = layer_of(name)
        if layer < 0:
            rows = shapes.get(EMBEDDING, (0,))[0] if name == "embed.embedding" else 0
            cut = lambda x, size=shape[0]: x[:size]
            found[name] = Part(_OUTER.get(name, name), (max(rows, shape[0]), *shape[1:]), cut)
            continue
        prefix = f"stacked_layers/attention_type_{layer % kinds}/" if kinds else f"layer_{layer}/"
        inside = {stored.removeprefix(prefix): own for stored, own in shapes.items() if stored.startswith(prefix)}
        index = layer // kinds if kinds else None
        inside = inside if index is None else {stored: own[1:] for stored, own in inside.items()}
        stored, expected, take = _of_layer(own, shape, config.attention(layer).head_dim, inside)
        if index is not None:
            expected = (*shapes.get(prefix + stored, (index + 1,))[:1], *expected)
            take = lambda x, take=take, index=index: take(x[index])
        found[name] = Part(prefix + stored, expected, take)
    return found


def _of_layer(own: str, shape: tuple[int, ...], width: int, inside: Shapes) -> tuple[str, tuple[int, ...], Take]:
    """The name of a layer's array, the shape that it should have, and the parameter from it."""
    if own in _GATING:
        which, turned = _GATING[own], (2, *shape[::-1])
        if inside.get("mlp/gating_einsum") == turned:
            return "mlp/gating_einsum", turned, lambda x: x[which].T
        return "mlp/gating_einsum", (2, *shape), lambda x: x[which]
    if own.startswith("attention.") and own.endswith(".kernel"):
        return projection(own, shape, width, inside)
    return _IN_LAYERS.get(own, own), shape, lambda x: x


def projection(own: str, shape: tuple[int, ...], width: int, inside: Shapes) -> tuple[str, tuple[int, ...], Take]:
    """What `_of_layer` gives of attention's matrices.

    Args:
      own: the parameter's name in its layer.
      shape: its shape.
      width: the width of a head.
      inside: the shapes of the layer's arrays.
    """
    if own == "attention.o.kernel":
        return _IN_LAYERS[own], (shape[0] // width, width, shape[1]), lambda x: x
    which, heads = _JOINED[own], (shape[1] // width, shape[0], width)
    if "attn/qkv_einsum" in inside:
        return "attn/qkv_einsum", (3, *heads), lambda x: x[which].swapaxes(0, 1)
    if which == 0:
        return "attn/q_einsum", heads, lambda x: x.swapaxes(0, 1)
    return "attn/kv_einsum", (2, *heads), lambda x: x[which - 1].swapaxes(0, 1)
