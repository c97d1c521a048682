"""The layout of MaxText (github.com/AI-Hypercomputer/maxtext), as its converters and its trainer write it.

Kernels are `[inputs, heads, width]` or `[heads, width, outputs]`, so in order they are ours. Layers are apart
(`layers_3`) or lie on an axis of every array (`layers`); with a pattern of layers, each of its places has an array
(`layers/layers_2`), and layers after the last whole pattern are apart (`layers_remainder`). Of Gemma 2, MaxText counts two
layers as one.
"""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.jax_folders.part import Named, Part, Shapes, check_layers, layer_of
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig
from specjax.models.norms import NormConfig

NAME = "MaxText"
_GEMMA = ("gemma", "gemma2", "gemma3_text")
_FOLDED = ("llama", "mistral", "mixtral", "gemma", "gemma2")
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", *_GEMMA)
"""The families that are read, by `model_type`. `_FOLDED` are those whose queries have the scale of scores in them."""
EMBEDDING = "token_embedder/embedding"
"""The table of embeddings; its rows may be padded."""
_OUTER = {"embed.embedding": EMBEDDING, "norm.scale": "decoder/decoder_norm/scale"}
_OUTER |= {"head.kernel": "decoder/logits_dense/kernel"}
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_MATRICES = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
_IN_LAYERS: dict[str, tuple[str, ...]] = {
    "attention_norm.scale": ("pre_self_attention_layer_norm/scale", "pre_self_attention_norm/scale"),
    "mlp_norm.scale": ("post_self_attention_layer_norm/scale", "pre_ffw_norm/scale"),
    "attention_post_norm.scale": ("post_self_attention_norm/scale",),
    "mlp_post_norm.scale": ("post_ffw_norm/scale",),
    "attention.q_norm.scale": ("self_attention/query_norm/scale",),
    "attention.k_norm.scale": ("self_attention/key_norm/scale",),
    "mlp.router.kernel": ("moe_block/gate/kernel", "MoeBlock_0/gate/kernel"),
    **{f"attention.{own}.{kind}": (f"self_attention/{name}/{kind}",)
       for own, name in _PROJECTIONS.items() for kind in ("kernel", "bias")},
    **{f"mlp.{own}.kernel": (f"mlp/{name}/kernel",) for own, name in _MATRICES.items()},
    **{f"mlp.experts.{own}.kernel": (f"moe_block/{name}", f"MoeBlock_0/{name}") for own, name in _MATRICES.items()},
}  # fmt: skip
_PLACE = re.compile(r"decoder/layers(_(?P<layer>\d+)|_remainder)?/(layers_(?P<block>\d+)/)?(?P<name>.+)")
_HALVES = {"_local": 0, "_global": 1}

Spots = dict[tuple[int, str], tuple[str, int | None]]
"""By layer and name in it: the array, and the index on its axis of layers (None: it has none)."""


def is_one(names: Any) -> bool:
    """Whether these are the names of a checkpoint in this layout."""
    return EMBEDDING in names


def is_unread(name: str) -> bool:
    """Whether an array belongs to no text model."""
    return name.startswith("vision_encoder/")


def parts(shapes: Shapes, wanted: Named, config: ModelConfig) -> dict[str, Part]:
    """Where each parameter is, by its name.

    Args:
      shapes: of the checkpoint's arrays.
      wanted: the parameters' shapes.
      config: the model's.

    Raises:
      ModelError: if MaxText's checkpoints of the model's family are not read, or layers lie on no axis.
    """
    if config.family not in FAMILIES:
        raise ModelError(
            f"MaxText's checkpoints of {config.family!r} are not read; those of {', '.join(FAMILIES)} are: convert this one "
            "with MaxText's to_huggingface and give that folder"
        )
    axis = _axis(shapes)
    spots = _spots(shapes, axis)
    scanned = any(name.startswith("decoder/layers/") for name in shapes)
    if scanned:
        check_layers(1 + max(layer for layer, _ in spots), config.num_hidden_layers)
    found = {}
    for name, shape in wanted.items():
        layer, own = layer_of(name)
        value = _value(name, layer, config)
        if layer < 0:
            found[name] = _outer(_OUTER.get(name, name), shape, shapes, value)
            continue
        names = _IN_LAYERS.get(own, (own,))
        there = next((one for one in names if (layer, one) in spots), names[0])
        stored, index = spots.get((layer, there), (f"decoder/layers{'' if scanned else f'_{layer}'}/{there}", None))
        inside, order = _inside(own, shape, layer, config), _order(own, layer, config)
        if index is None:
            found[name] = Part(stored, inside, order, value)
        else:
            whole = (*inside[:axis], shapes[stored][axis], *inside[axis:])
            take = lambda x, order=order, index=index: order(x[(slice(None),) * axis + (index,)])
            found[name] = Part(stored, whole, take, value)
    return found


def as_stored(config: ModelConfig) -> ModelConfig:
    """The same model with MaxText's factors in it, so that MaxText's numbers are its parameters (`Part.take`)."""
    if config.family in _FOLDED:
        config = config.every(AttentionConfig, scale=1.0)
    if config.family in _GEMMA:
        config = config.every(NormConfig, kind="wide").every(EmbeddingConfig, scale=1.0)
        config = config.every(HeadConfig, logits_scaling=float(_embedding_scale(config)))
    return config


def _outer(stored: str, shape: tuple[int, ...], shapes: Shapes, value: Callable) -> Part:
    """A parameter outside layers; the rows of the table and the columns of the head that pad the vocabulary are cut."""
    cut = tuple(slice(size) for size in shape)
    own = shapes.get(stored, shape)
    padded = len(own) == len(shape) == 2 and all(a >= b for a, b in zip(own, shape, strict=True))
    along = 1 if stored != EMBEDDING else 0
    expected = tuple(own[i] if padded and i == along else size for i, size in enumerate(shape))
    return Part(stored, expected, lambda x: x[cut], value)


def _axis(shapes: Shapes) -> int:
    """The axis of layers: 1, as MaxText has it, unless only the first is as long in all arrays."""
    stacked = [shape for name, shape in shapes.items() if name.startswith("decoder/layers/")]
    for axis in (1, 0):
        if len({shape[axis] if len(shape) > axis else 0 for shape in stacked}) <= 1:
            return axis
    raise ModelError("MaxText's layers lie neither on the second axis of all its arrays nor on the first")


def _spots(shapes: Shapes, axis: int) -> Spots:
    matched = {name: match for name in shapes if (match := _PLACE.fullmatch(name))}
    stacked = {name: match for name, match in matched.items() if name.startswith("decoder/layers/")}
    blocks = 1 + max((int(match["block"] or 0) for match in stacked.values()), default=0)
    count = next((shapes[name][axis] for name in stacked), 0)
    found: Spots = {}
    for stored, match in matched.items():
        first, slash, rest = match["name"].partition("/")
        half = next((half for half in _HALVES if first.endswith(half)), None)
        name = first.removesuffix(half or "") + slash + rest
        block = int(match["block"] or 0)
        if stored in stacked:
            places = [(i * blocks + block, i) for i in range(count)]
        else:
            places = [(int(match["layer"]) if match["layer"] else count * blocks + block, None)]
        for layer, index in places:
            found[layer if half is None else 2 * layer + _HALVES[half], name] = stored, index
    return found


def _inside(own: str, shape: tuple[int, ...], layer: int, config: ModelConfig) -> tuple[int, ...]:
    """The shape that a layer's parameter has in MaxText."""
    module, _, kind = own.removeprefix("attention.").partition(".")
    if not own.startswith("attention.") or module not in _PROJECTIONS or (module, kind) == ("o", "bias"):
        return shape
    width = config.attention(layer).head_dim
    if module == "o":
        return (shape[0] // width, width, shape[1])
    return (*shape[:-1], shape[-1] // width, width)


def _value(name: str, layer: int, config: ModelConfig) -> Callable[[np.ndarray], np.ndarray]:
    """What turns MaxText's numbers of a parameter into ours."""
    family, own = config.family, layer_of(name)[1]
    if own.endswith("scale") and family in _GEMMA:
        return lambda x: x.astype(np.float32) - 1  # MaxText multiplies by the weights, and not by one more
    if name == "embed.embedding" and family in _GEMMA:
        return lambda x: x.astype(np.float32) / _embedding_scale(config)
    if own.startswith("attention.q.") and family in _FOLDED:
        by = np.float32(1 / config.attention(layer).scores_scale)
        return lambda x: x.astype(np.float32) * by
    return lambda x: x


def _embedding_scale(config: ModelConfig) -> np.float32:
    """What embeddings of Gemma are multiplied by in MaxText, as its converters round it: of Gemma 2 to float32, of the
    others to bfloat16."""
    root = np.float32(config.hidden_size**0.5)
    return root if config.family == "gemma2" else np.float32(root.astype(ml_dtypes.bfloat16))


def _order(own: str, layer: int, config: ModelConfig) -> Callable[[Any], Any]:
    """What turns MaxText's order of a layer's parameter into ours."""
    if config.family != "llama" or not own.startswith(("attention.q.", "attention.k.")):
        return lambda x: x
    rope = config.attention(layer).rope
    turned = rope is not None and rope.scaling is not None and rope.scaling.kind == "llama3"
    return _halves if turned else lambda x: x


def _halves(x: Any) -> Any:
    """Queries or keys `[..., heads, width]`, with neighbouring channels moved apart."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
