"""Safetensors files as memory maps, and the names that Hugging Face gives to our parameters.

The map is read slice by slice, so a host never holds more of a checkpoint than the shards it owns.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.models.errors import ModelError

_TYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}
_INDEX_TYPES = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64), "BOOL": np.dtype(bool)}  # of draft heads
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")  # buffers that old checkpoints carry; we compute them


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file: read with `array()`, nothing is read before."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def array(self) -> np.ndarray:
        """A read-only view of the file.

        Raises:
          ModelError: when the type is none that we know.
        """
        types = _TYPES | _INDEX_TYPES
        if self.dtype not in types:
            raise ModelError(f"{self.file}: {self.name} has type {self.dtype}; supported are {', '.join(_TYPES)}")
        raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.size,)) if self.size else np.empty(0, np.uint8)
        return np.asarray(raw).view(types[self.dtype]).reshape(self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file.

    Raises:
      ModelError: when the file is truncated or is no safetensors file.
    """
    total = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if total < 8 or length > total - 8:
            raise ModelError(f"{file} is truncated or is not a safetensors file; fetch it again")
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            name: Tensor(
                name, file, str(entry["dtype"]), tuple(map(int, entry["shape"])), 8 + length + begin, end - begin
            )
            for name, entry in header.items()
            for begin, end in [map(int, entry["data_offsets"])]
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} has a malformed safetensors header; fetch it again") from error
    for tensor in tensors.values():
        dtype = (_TYPES | _INDEX_TYPES).get(tensor.dtype)
        if tensor.size < 0 or tensor.offset < 8 + length or tensor.offset + tensor.size > total:
            raise ModelError(f"{file} is truncated: {tensor.name} lies outside it; fetch it again")
        if dtype is not None and tensor.size != math.prod(tensor.shape) * dtype.itemsize:
            raise ModelError(f"{file}: {tensor.name} of shape {tensor.shape} does not fill its {tensor.size} bytes")
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises:
      ModelError: when there are no weights, a shard is missing, or a file is malformed.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        hint = "; convert its .bin weights to safetensors first" if list(folder.glob("*.bin")) else ""
        raise ModelError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{hint}")
    try:
        places = {str(name): str(shard) for name, shard in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is malformed: it needs a weight_map from tensor names to files") from error
    shards = sorted(set(places.values()))
    absent = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
    if absent:
        raise ModelError(f"{index} names files that are not in the folder: {', '.join(absent)}; fetch them")
    headers = {shard: read_header(folder / shard) for shard in shards}
    tensors: dict[str, Tensor] = {}
    for header in headers.values():
        tensors |= header
    return tensors | {name: headers[shard][name] for name, shard in places.items() if name in headers[shard]}


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


Names = Callable[[str], str]
"""From a tensor's name in Llama's layout to that in another."""

Layout = Callable[[tuple[Any, ...]], tuple[str, bool]]
"""From a parameter's path to its tensor's name, and whether its matrices are stored transposed; see `hf_name`."""


def match(tensors: dict[str, Tensor], abstract: Any, tied: bool, names: Names = str, layout: Layout = hf_name) -> Any:
    """For every leaf of `abstract` the memory-mapped matrix of its shape.

    Raises:
      ModelError: naming every tensor that is missing, misshapen or not used.
    """
    wanted, problems = {}, []

    def find(path, leaf):
        name, transposed = layout(path)
        name = names(name)
        shape = _stored(leaf.shape, transposed)
        wanted[name] = None
        if name not in tensors:
            problems.append(f"missing {name} {list(shape)}")
        elif tensors[name].dtype in _INDEX_TYPES:
            problems.append(f"{name} has type {tensors[name].dtype}, weights are {', '.join(_TYPES)}")
        elif tensors[name].shape != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, config.json says {list(shape)}")
        else:
            return lambda: tensors[name].array().swapaxes(-1, -2) if transposed else tensors[name].array()

    readers = jax.tree_util.tree_map_with_path(find, abstract)
    spare = [name for name in tensors if name not in wanted and not _HARMLESS.search(name)]
    head, table = names("lm_head.weight"), names("model.embed_tokens.weight")
    if tied and head in spare and not problems:  # old checkpoints store the tied matrix twice
        spare.remove(head)
        if not np.array_equal(tensors[head].array(), tensors[table].array()):
            problems.append(f"{head} differs from {table}, but tie_word_embeddings is true")
    problems += [f"unused {name} {list(tensors[name].shape)}" for name in spare]
    if problems:
        more = f"; and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise ModelError(f"the weights do not fit config.json: {'; '.join(problems[:12])}{more}")
    return jax.tree.map(lambda reader: reader(), readers)


def _stored(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def place(array: np.ndarray, dtype: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Copies a matrix to its devices in `dtype`; with a sharding, only the slices of this host's shards are read."""
    if sharding is None:
        return jax.numpy.asarray(np.array(array, dtype, order="C"))
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.array(array[index], dtype, order="C"), dtype=dtype
    )


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
        shape = _stored(leaf.shape, transposed)
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
