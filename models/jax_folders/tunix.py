"""The layout of Tunix (github.com/google/tunix): its Llama 3, Qwen 2, Qwen 3, Gemma 1, 2 and 3.

Layers are apart. Kernels of Llama and Qwen are `[inputs, heads, width]` and `[heads, width, outputs]`, in order ours.
Gemma's attention has the arrays of the library `gemma`.
"""

from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.jax_folders import gemma
from specjax.models.jax_folders.part import Named, Part, Shapes, check_layers, layer_of
from specjax.models.model_config import ModelConfig

NAME = "Tunix"
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", *gemma.FAMILIES)
"""The families that are read, by `model_type`."""
EMBEDDING = gemma.EMBEDDING
"""The table of embeddings; its rows may be padded."""
_OUTER = {
    "embed.embedding": (EMBEDDING,),
    "norm.scale": ("final_norm", "final_norm/scale"),
    "head.kernel": ("lm_head",),
}
_MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_IN_LAYERS: dict[str, tuple[str, ...]] = {
    "attention_norm.scale": ("input_layernorm", "pre_attention_norm/scale"),
    "mlp_norm.scale": ("post_attention_layernorm", "pre_ffw_norm/scale"),
    "attention_post_norm.scale": ("post_attn_norm/scale", "post_attention_norm/scale"),
    "mlp_post_norm.scale": ("post_ffw_norm/scale",),
    "attention.q_norm.scale": ("attn/q_norm", "attn/_query_norm/scale"),
    "attention.k_norm.scale": ("attn/k_norm", "attn/_key_norm/scale"),
    "mlp.router.kernel": ("mlp/router/kernel",),
    **{f"attention.{name}.kernel": (f"attn/{name}_proj",) for name in "qkvo"},
    **{f"attention.{name}.bias": (f"attn/{name}_bias",) for name in "qkv"},
    **{f"mlp.{own}.kernel": (f"mlp/{name}/kernel",) for own, name in _MATRICES.items()},
    **{f"mlp.experts.{own}.kernel": (f"mlp/{name}",) for own, name in _MATRICES.items()},
}  # fmt: skip


def is_one(names: Any) -> bool:
    """Whether these are the names of arrays in this layout."""
    return EMBEDDING in names and any(name.startswith("layers/") for name in names)


def is_unread(name: str) -> bool:
    """Whether an array belongs to no text model."""
    return name.startswith(("vision_encoder/", "embedder/mm_"))


def as_stored(config: ModelConfig) -> ModelConfig:
    """The model whose parameters are Tunix's numbers: the same."""
    return config


def parts(shapes: Shapes, wanted: Named, config: ModelConfig) -> dict[str, Part]:
    """Where each parameter is, by its name; see `specjax.models.jax_folders.maxtext.parts`."""
    if config.family not in FAMILIES:
        raise ModelError(f"Tunix's models of {', '.join(FAMILIES)} are read, and the config is of {config.family!r}")
    by_layer: dict[int, dict[str, tuple[int, ...]]] = {}
    for stored, shape in shapes.items():
        first, _, rest = stored.partition("/")
        number, _, own = rest.partition("/")
        if first == "layers" and number.isdecimal():
            by_layer.setdefault(int(number), {})[own] = shape
    check_layers(len(by_layer), config.num_hidden_layers)
    found = {}
    for name, shape in wanted.items():
        layer, own = layer_of(name)
        if layer < 0:
            found[name] = _outer(name, shape, shapes)
            continue
        inside = by_layer[layer]
        stored, expected, take = _of_layer(own, shape, config.attention(layer).head_dim, inside)
        found[name] = Part(f"layers/{layer}/{stored}", expected, take)
    return found


def _outer(name: str, shape: tuple[int, ...], shapes: Shapes) -> Part:
    names = _OUTER.get(name, (name,))
    stored = next((one for one in names if one in shapes), names[0])
    rows = shapes.get(stored, (0,))[0] if stored == EMBEDDING else 0
    return Part(stored, (max(rows, shape[0]), *shape[1:]), lambda x: x[: shape[0]])


def _of_layer(own: str, shape: tuple[int, ...], width: int, inside: Shapes) -> tuple[str, tuple[int, ...], Callable]:
    """The name of a layer's array, the shape that it should have, and the parameter from it."""
    same = lambda x: x
    projection = own.startswith("attention.") and own.endswith(".kernel")
    if projection and "attn/attn_vec_einsum" in inside:
        return gemma.projection(own, shape, width, inside)
    names = _IN_LAYERS.get(own, (own,))
    stored = next((one for one in names if one in inside), names[0])
    if not projection:
        return stored, shape, same
    if own == "attention.o.kernel":
        return stored, (shape[0] // width, width, shape[1]), same
    return stored, (shape[0], shape[1] // width, width), same
