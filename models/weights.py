"""The names that Hugging Face gives to our parameters: where each one is stored, and folders with all of them."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.models.errors import ModelError
from specjax.models.reading import Source, equal, stored_shape
from specjax.models.tensors import FLOATS, INTEGERS, Tensor

_CODES = {dtype: code for code, dtype in FLOATS.items()}
# buffers that old checkpoints carry, which we compute; heads that were saved with their target, which drafters read
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|^medusa_head\.|^(model\.)?mtp(_layers)?\.")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter, and whether its matrix is stored transposed (`[out, in]`)."""
    keys = [getattr(key, "key", key) for key in path]
    kind = "bias" if keys[-1] == "bias" else "weight"
    match keys[:-1]:
        case ["embed"]:
            module = "model.embed_tokens"
        case ["norm"]:
            module = "model.norm"
        case ["head"]:
            module = "lm_head"
        case ["layers", layer, "attention_norm"]:
            module = f"model.layers.{layer}.input_layernorm"
        case ["layers", layer, "mlp_norm"]:
            module = f"model.layers.{layer}.post_attention_layernorm"
        case ["layers", layer, "attention", "q_norm" | "k_norm" as name]:
            module = f"model.layers.{layer}.self_attn.{name}"
        case ["layers", layer, "attention", name]:
            module = f"model.layers.{layer}.self_attn.{name}_proj"
        case ["layers", layer, "mlp", name]:
            module = f"model.layers.{layer}.mlp.{name}_proj"
        case _:
            raise ModelError(f"parameter {'.'.join(map(str, keys))} has no Hugging Face name")
    return f"{module}.{kind}", keys[-1] == "kernel"


def extra_layer(name: str, layers: int, count: int = 2**31) -> bool:
    """Whether a tensor is one of at most `count` layers behind the `layers` that a model counts: they draft for it."""
    found = _LAYER.match(name)
    return found is not None and layers <= int(found[1]) < layers + count


Names = Callable[[str], str]
"""From a tensor's name in Llama's layout to that in another."""

Layout = Callable[[tuple[Any, ...]], tuple[str, bool]]
"""From a parameter's path to its tensor's name, and whether its matrices are stored transposed; see `hf_name`."""


def match(
    tensors: dict[str, Tensor],
    abstract: Any,
    tied: bool,
    names: Names = str,
    layout: Layout = hf_name,
    share: tuple[int, int] = (0, 1),
) -> Any:
    """For every leaf of `abstract` the `Source` of its shape. No weights are read, but those that are stored twice.

    Args:
      tensors: of the folder, by name.
      abstract: the params pytree as `ShapeDtypeStruct`s.
      tied: whether the head is the embedding.
      names: see `Names`.
      layout: see `Layout`.
      share: the part of what is stored twice that is compared here, see `specjax.models.reading.equal`.

    Raises:
      ModelError: naming every tensor that is missing, misshapen, of an unknown type or not used.
    """
    wanted, problems = {}, []

    def find(path, leaf):
        name, transposed = layout(path)
        name = names(name)
        shape = stored_shape(leaf.shape, transposed)
        wanted[name] = None
        if name not in tensors:
            problems.append(f"missing {name} {list(shape)}")
        elif tensors[name].dtype in INTEGERS:
            problems.append(f"{name} has type {tensors[name].dtype}, weights are {', '.join(FLOATS)}")
        elif tensors[name].shape != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, config.json says {list(shape)}")
        else:
            return Source(tensors[name], transposed)

    sources = jax.tree_util.tree_map_with_path(find, abstract)
    spare = [name for name in tensors if name not in wanted and not _HARMLESS.search(name)]
    head, table = names("lm_head.weight"), names("model.embed_tokens.weight")
    if tied and head in spare and not problems:  # old checkpoints store the tied matrix twice
        spare.remove(head)
        if not equal(tensors[head], tensors[table], share):
            problems.append(f"{head} differs from {table}, but tie_word_embeddings is true")
    problems += [f"unused {name} {list(tensors[name].shape)}" for name in spare]
    if problems:
        raise ModelError(f"the weights do not fit config.json: {listed(problems)}")
    for source in jax.tree.leaves(sources):
        _ = source.tensor.kind  # an unknown type is an error before anything is read
    return sources


def listed(problems: list[str]) -> str:
    """The first twelve of them in one line."""
    return "; ".join(problems[:12]) + (f"; and {len(problems) - 12} more" if len(problems) > 12 else "")


def write(file: Path, params: Any, dtype: Any, names: Names = str, layout: Layout = hf_name) -> None:
    """Writes a params pytree as one safetensors file under the Hugging Face names, one parameter at a time."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name, transposed = layout(path)
        leaves[names(name)] = (leaf, transposed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name in sorted(leaves):
        leaf, transposed = leaves[name]
        kind = np.dtype(leaf.dtype if dtype is None else dtype)
        if kind not in _CODES:
            raise ModelError(f"{name} cannot be written as {kind}; choose float32, bfloat16 or float16")
        shape = stored_shape(leaf.shape, transposed)
        size = math.prod(shape) * kind.itemsize
        header[name] = {"dtype": _CODES[kind], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(leaves):
            leaf, transposed = leaves[name]
            array = np.asarray(leaf)
            array = array.swapaxes(-1, -2) if transposed else array
            stream.write(np.array(array, leaf.dtype if dtype is None else dtype, order="C").tobytes())
        stream.flush()
        os.fsync(stream.fileno())
