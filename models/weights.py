"""The Hugging Face names of our parameters: where each is stored, and writing them to folders."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.models.byte_ranges import Box, Source, Stack, fill, stored_shape
from specjax.models.errors import ModelError
from specjax.models.few_bits import is_quantised, plain
from specjax.models.on_disk import to_disk
from specjax.models.tensors import FLOATS, INTEGERS, Tensor, shaped

_CODES = {dtype: code for code, dtype in FLOATS.items()}
# buffers in old checkpoints, which we compute; heads saved with their target, which drafters read
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|^medusa_head\.|^(model\.)?mtp(_layers)?\.")
CACHE_SCALES = re.compile(r"\.(k|v|kv|q|prob_output)_(scale|zero_point)$|\.[kv]_proj\.output_(scale|zero_point)$")
"""Names of scales that a checkpoint may have for a quantised cache, and for attention over it."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter, and whether its matrices are stored transposed (`[out, in]`); see `Layout`."""
    keys = [getattr(key, "key", key) for key in path]
    kind = "bias" if keys[-1] == "bias" else "weight"
    match keys[:-1]:
        case ["layers", layer, "mlp"] if keys[-1] == "ces":
            return f"model.layers.{layer}.mlp.ces", False
        case ["encoder", *own]:
            name, transposed = hf_name((*own, keys[-1]))
            return f"encoder.{name}", transposed
        case ["frames", name]:
            module = f"frames.{name}"
        case ["distances"]:
            module = "distances"
        case ["layers", layer, "cross_norm"]:
            module = f"model.layers.{layer}.cross_norm"
        case ["layers", layer, "cross", name]:
            module = f"model.layers.{layer}.cross_attn.{name}_proj"
        case ["embed"]:
            module = "model.embed_tokens"
        case ["positions"]:
            module = "model.embed_positions"
        case ["embed_norm"]:
            module = "model.embed_norm"
        case ["norm"]:
            module = "model.norm"
        case ["project_in" | "project_out" as name]:
            module = f"model.{name}"
        case ["transform", name]:
            module = f"transform.{name}"
        case ["head"]:
            module = "lm_head"
        case ["layers", layer, "attention_norm"]:
            module = f"model.layers.{layer}.input_layernorm"
        case ["layers", layer, "mlp_norm"]:
            module = f"model.layers.{layer}.post_attention_layernorm"
        case ["layers", layer, "attention", "q_norm" | "k_norm" as name]:
            module = f"model.layers.{layer}.self_attn.{name}"
        case ["layers", layer, "attention", "q_wide_norm" | "k_wide_norm" as name]:
            module = f"model.layers.{layer}.self_attn.{name[0]}_norm"
        case ["layers", layer, "attention", name]:
            module = f"model.layers.{layer}.self_attn.{name}_proj"
        case ["layers", layer, "mlp", "router"]:
            module = f"model.layers.{layer}.mlp.gate"
        case ["layers", layer, "mlp", "experts", name]:
            module = f"model.layers.{layer}.mlp.experts.{{}}.{name}_proj"
        case ["layers", layer, "mlp", "into_latent" | "out_of_latent" as name]:
            module = f"model.layers.{layer}.mlp.{name}"
        case ["layers", layer, "mlp", "shared_gate"]:
            module = f"model.layers.{layer}.mlp.shared_expert_gate"
        case ["layers", layer, "mlp", "shared", name]:
            module = f"model.layers.{layer}.mlp.shared_experts.{name}_proj"
        case ["layers", layer, "mlp", name]:
            module = f"model.layers.{layer}.mlp.{name}_proj"
        case _:
            raise ModelError(f"parameter {'.'.join(map(str, keys))} has no Hugging Face name")
    return f"{module}.{kind}", keys[-1] == "kernel"


def without_cache_scales(tensors: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Tensors by name without the scales of a quantised cache, and the names of those scales.

    Caches here compute their own scales, one for each slot and head.
    """
    left_out = [name for name in tensors if CACHE_SCALES.search(name)]
    return {name: x for name, x in tensors.items() if name not in set(left_out)}, left_out


def extra_layer(name: str, layers: int, count: int = 2**31) -> bool:
    """Whether a tensor belongs to one of at most `count` layers after a model's `layers`; such layers draft for it."""
    found = _LAYER.match(name)
    return found is not None and layers <= int(found[1]) < layers + count


Names = Callable[[str], str]
"""Maps a tensor's name in Llama's layout to its name in another. A name that ends in `#0`, `#1`, ... is the first,
second, ... part of a tensor whose outputs several parameters share. With `#0/8`, these are in 8 equal runs, each of which
has outputs of every part. One that ends in `%64/128` has heads of 128 rows, of which the first 64 are turned in neighbouring
pairs, and with `%32+64/128` 64 after 32 others; see `Pairs`. One that ends in `:2` is in a tensor whose rows have a further
first axis, two parts to an index. A `~` right after the name itself says that the tensor has an axis of one before
its last, as those of depthwise convolutions have."""
_MARKS = re.compile(
    r"(?P<name>[^#%:~]+)(?P<unit>~)?(#(?P<place>\d+)(/(?P<runs>\d+))?)?(%((?P<before>\d+)\+)?(?P<turned>\d+)/(?P<width>\d+))?"
    r"(:(?P<each>\d+))?"
)

Layout = Callable[[tuple[Any, ...]], tuple[str, bool]]
"""Maps a parameter's path to its tensor's name, and says whether its matrices are stored transposed. A name with `{}`
stands for one tensor per index of the parameter's first axis (experts). See `hf_name`."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The rows of queries or keys in a file whose rope turns neighbours together; ours turns two halves of a head.

    Attributes:
      turned: how many rows of a head are turned.
      width: all rows of a head.
      apart: whether heads are an axis, and their channels the next one, as in norms of each head.
      before: how many rows of a head come before those that are turned.
    """

    turned: int
    width: int
    apart: bool = False
    before: int = 0

    @property
    def _order(self) -> list[int]:
        """The file's row of each of our rows."""
        end = self.before + self.turned
        halves = *range(self.before, end, 2), *range(self.before + 1, end, 2)
        return [*range(self.before), *halves, *range(end, self.width)]

    def halved(self, rows: np.ndarray) -> np.ndarray:
        """Our rows of whole heads, from the file's.

        >>> Pairs(4, 6).halved(np.arange(12)).tolist()
        [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
        """
        return self._ordered(rows, self._order)

    def joined(self, rows: np.ndarray) -> np.ndarray:
        """The file's rows of whole heads, from ours."""
        return self._ordered(rows, np.argsort(self._order))

    def _ordered(self, rows: np.ndarray, order: Any) -> np.ndarray:
        if self.apart:
            return rows[:, order]
        return rows.reshape(-1, self.width, *rows.shape[1:])[:, order].reshape(rows.shape)

    def of(self, tensor: Tensor) -> Tensor:
        """A stored tensor with its rows as ours. They are read head by head, and codes of few bits are made plain."""

        def read(wanted: list[tuple[Box, np.ndarray]]) -> None:
            for ((start, stop), *rest), own in wanted:
                for first in range(start // self.width * self.width, stop, self.width):
                    head = np.empty((self.width, *own.shape[1:]), own.dtype)
                    fill(tensor, [(((first, first + self.width), *rest), head)])
                    inside = max(start, first), min(stop, first + self.width)
                    own[inside[0] - start : inside[1] - start] = self.halved(head)[
                        inside[0] - first : inside[1] - first
                    ]

        def read_apart(wanted: list[tuple[Box, np.ndarray]]) -> None:
            for (heads, (start, stop)), own in wanted:
                whole = np.empty((own.shape[0], self.width), own.dtype)
                fill(tensor, [((heads, (0, self.width)), whole)])
                own[...] = self.halved(whole)[:, start:stop]

        return dataclasses.replace(tensor, read=read_apart if self.apart else read, packed=None)


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter's part of a stored tensor: all of it, or some of its outputs.

    Attributes:
      leaf: the parameter.
      index: an index of its first axis, or None for the whole parameter.
      shape: the shape in the file.
      transposed: see `Layout`.
      runs: in how many equal runs its outputs lie; between them are those of the other parts.
      pairs: of its rows; None: they are as ours.
      each: how many parts an index of the tensor's further first axis has; 0: there is none.
      unit: whether the tensor has an axis of one before its last.
    """

    leaf: int
    index: int | None
    shape: tuple[int, ...]
    transposed: bool
    runs: int = 1
    pairs: Pairs | None = None
    each: int = 0
    unit: bool = False

    @property
    def axis(self) -> int:
        """The axis of its outputs in the file."""
        return 0 if self.transposed else len(self.shape) - 1

    def ours(self, rows: np.ndarray) -> np.ndarray:
        """Its rows in the order of the parameter, from those of the file."""
        return rows if self.pairs is None else self.pairs.halved(rows)


def stored_parts(leaves: list[tuple[Any, Any]], names: Names, layout: Layout) -> dict[str, list[Part]]:
    """The parameters in each tensor of a file, by the tensor's name, in the order of its rows."""
    found: dict[str, dict[int, Part]] = {}
    for i, (path, leaf) in enumerate(leaves):
        name, transposed = layout(path)
        several = "{}" in name
        shape = stored_shape(leaf.shape[1:] if several else leaf.shape, transposed)
        for index in range(leaf.shape[0]) if several else (None,):
            marks = _MARKS.fullmatch(names(name.format(index)))
            assert marks is not None, f"{name} has other marks"
            number = lambda mark, usual=0, marks=marks: int(marks[mark] or usual)
            apart = len(shape) == 2 and not transposed
            pairs = None
            if marks["width"]:
                pairs = Pairs(number("turned"), number("width"), apart, number("before"))
            unit = marks["unit"] is not None
            part = Part(i, index, shape, transposed, number("runs", 1), pairs, number("each"), unit)
            found.setdefault(marks["name"], {})[number("place")] = part
    return {name: [parts[place] for place in sorted(parts)] for name, parts in found.items()}


def _whole(parts: list[Part]) -> tuple[int, ...]:
    """The shape of all of their outputs."""
    shape, axis = parts[0].shape, parts[0].axis
    if len(parts) == 1:
        return shape  # a number has no axis
    return (*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :])


def cut_array(array: np.ndarray, parts: list[Part], axis: int | None = None) -> list[np.ndarray]:
    """The outputs of each of them, from an array of all; they are on its axis `axis` (None: as in the file)."""
    array = array.reshape(_whole(parts)) if parts[0].each or parts[0].unit else array
    axis, runs = parts[0].axis if axis is None else axis, parts[0].runs
    if len(parts) == 1:
        return [array]
    split = array.reshape(*array.shape[:axis], runs, -1, *array.shape[axis + 1 :])
    ends = list(itertools.accumulate(part.shape[part.axis] // runs for part in parts))
    found = np.split(split, ends[:-1], axis=axis + 1)
    return [own.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :]) for own in found]


def joined(arrays: list[np.ndarray], parts: list[Part]) -> np.ndarray:
    """The tensor that holds them; the inverse of `cut_array`."""
    axis, runs = parts[0].axis, parts[0].runs
    if len(parts) == 1:
        return arrays[0].reshape(shape_of(parts))
    split = [own.reshape(*own.shape[:axis], runs, -1, *own.shape[axis + 1 :]) for own in arrays]
    return np.concatenate(split, axis=axis + 1).reshape(shape_of(parts))


def shape_of(parts: list[Part]) -> tuple[int, ...]:
    """The shape of the tensor that holds them."""
    shape, each = _whole(parts), parts[0].each
    shape = (*shape[:-1], 1, shape[-1]) if parts[0].unit else shape
    return (len(parts) // each, shape[0] * each // len(parts), *shape[1:]) if each else shape


def cut(tensor: Tensor, parts: list[Part]) -> list[Tensor]:
    """The outputs of each of them, with their rows as ours; a tensor with a further axis must be stored as plain numbers."""
    whole = zip(parts, _cut(tensor, parts), strict=True)
    return [own if part.pairs is None else part.pairs.of(own) for part, own in whole]


def _cut(tensor: Tensor, parts: list[Part]) -> list[Tensor]:
    tensor = dataclasses.replace(tensor, shape=_whole(parts)) if parts[0].each or parts[0].unit else tensor
    if len(parts) == 1:
        return [tensor]
    runs, axis = parts[0].runs, parts[0].axis
    ends = itertools.accumulate(part.shape[axis] // runs for part in parts)
    starts = [end - part.shape[axis] // runs for part, end in zip(parts, ends, strict=True)]
    if axis == 0 and runs == 1:
        return [tensor.rows(start, start + part.shape[0]) for part, start in zip(parts, starts, strict=True)]
    return [_some(tensor, part, start) for part, start in zip(parts, starts, strict=True)]


def _some(tensor: Tensor, part: Part, start: int) -> Tensor:
    """The outputs of a part, which begin at `start` in every run."""
    axis, runs = part.axis, part.runs
    size, whole = part.shape[axis] // runs, tensor.shape[axis] // runs

    def read(wanted: list[tuple[Any, np.ndarray]]) -> None:
        boxes = []
        for box, own in wanted:
            first, last = box[axis]
            for run in range(first // size, -(-last // size)):
                lo, hi = max(first, run * size), min(last, (run + 1) * size)
                moved = run * (whole - size) + start
                inside = (slice(None),) * axis + (slice(lo - first, hi - first),)
                boxes.append(((*box[:axis], (lo + moved, hi + moved), *box[axis + 1 :]), own[inside]))
        fill(tensor, boxes)

    return dataclasses.replace(tensor, shape=part.shape, read=read, packed=None)


def match(
    tensors: dict[str, Tensor],
    abstract: Any,
    tied: bool,
    names: Names = str,
    layout: Layout = hf_name,
) -> Any:
    """The `Source` or `Stack` for every leaf of `abstract`. No weights are read.

    Args:
      tensors: the folder's tensors by name.
      abstract: the params pytree as `ShapeDtypeStruct`s.
      tied: whether the head is the embedding, which old checkpoints store twice.
      names: see `Names`.
      layout: see `Layout`.

    Raises:
      ModelError: naming every tensor that is missing, misshapen, unused or of an unknown type.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    stored, problems = stored_parts(leaves, names, layout), []
    tensors = {name: shaped(own, shape_of(stored[name])) if name in stored else own for name, own in tensors.items()}
    sources: list[list[Source]] = [[] for _ in leaves]
    for name, parts in stored.items():
        shape = shape_of(parts)
        if name not in tensors:
            problems.append(f"missing {name} {list(shape)}")
        elif tensors[name].dtype in INTEGERS:
            problems.append(f"{name} has type {tensors[name].dtype}, weights are {', '.join(FLOATS)}")
        elif (parts[0].each or parts[0].unit) and tensors[name].read is not None:
            problems.append(
                f"{name} is packed, which is not supported for a convolution or a tensor of several parameters"
            )
        elif tensors[name].shape != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, config.json says {list(shape)}")
        else:
            for part, own in zip(parts, cut(tensors[name], parts), strict=True):
                sources[part.leaf].append(Source(own, part.transposed, leaves[part.leaf][1].dtype))
    twice = names("lm_head.weight") if tied else None
    spare = [name for name in tensors if name not in stored and name != twice and not _HARMLESS.search(name)]
    problems += [f"unused {name} {list(tensors[name].shape)}" for name in spare]
    if problems:
        raise ModelError(f"the weights do not fit config.json: {listed(problems)}")
    for name in stored:
        _ = tensors[name].kind  # an unknown type is an error before anything is read
    several = ["{}" in layout(path)[0] for path, _ in leaves]
    whole = [Stack(tuple(own), own[0].dtype) if n else own[0] for own, n in zip(sources, several, strict=True)]
    return jax.tree.unflatten(tree, whole)


def listed(problems: list[str]) -> str:
    """The first twelve problems in one line."""
    return "; ".join(problems[:12]) + (f"; and {len(problems) - 12} more" if len(problems) > 12 else "")


def stored(params: Any, dtype: Any, names: Names = str, layout: Layout = hf_name) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a params pytree under their Hugging Face names; `dtype` is as for `write`."""
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantised)[0]
    for name, parts in sorted(stored_parts(leaves, names, layout).items()):
        yield name, joined([_array(leaves[part.leaf][1], part, dtype) for part in parts], parts)


def _array(leaf: Any, part: Part, dtype: Any) -> np.ndarray:
    """A part of a tensor as the file stores it; a packed matrix is unpacked."""
    array = np.asarray(plain(leaf if part.index is None else jax.tree.map(lambda x: x[part.index], leaf)))
    array = array.swapaxes(-1, -2) if part.transposed else array
    array = array if part.pairs is None else part.pairs.joined(array)
    return np.array(array, leaf.dtype if dtype is None else dtype, order="C")


def write_arrays(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays as one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, codes = 0, _CODES | {dtype: code for code, dtype in INTEGERS.items()}
    for name, array in arrays.items():
        stop = offset + array.nbytes
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": [offset, stop]}
        offset = stop
    _write(file, header, (array.tobytes() for array in arrays.values()))


def _write(file: Path, header: dict[str, Any], pieces: Iterable[bytes]) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            stream.write(piece)
        stream.flush()
        to_disk(stream.fileno())


def write(file: Path, params: Any, dtype: Any, names: Names = str, layout: Layout = hf_name) -> None:
    """Writes a params pytree as one safetensors file under the Hugging Face names, one parameter at a time."""
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantised)[0]
    found = dict(sorted(stored_parts(leaves, names, layout).items()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offset = 0
    for name, parts in found.items():
        kind = np.dtype(leaves[parts[0].leaf][1].dtype if dtype is None else dtype)
        if kind not in _CODES:
            raise ModelError(f"{name} cannot be written as {kind}; choose float32, bfloat16 or float16")
        shape = shape_of(parts)
        size = math.prod(shape) * kind.itemsize
        header[name] = {"dtype": _CODES[kind], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    array = lambda part: _array(leaves[part.leaf][1], part, dtype)
    in_rows = lambda parts: all(part.axis == 0 and part.runs == 1 for part in parts)
    each = lambda parts: map(array, parts) if in_rows(parts) else [joined(list(map(array, parts)), parts)]
    _write(file, header, (own.tobytes() for parts in found.values() for own in each(parts)))
