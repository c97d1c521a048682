"""A folder with another library's Orbax checkpoint: where it is, its vocabulary, and its parameters as ours.

Arrays are read one after the other, the largest first, and each is gone once its parameters are on their devices. So a
host holds its own shards and, at the end, one small array.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from specjax.models.byte_ranges import Room
from specjax.models.errors import ModelError
from specjax.models.jax_folders.place import located
from specjax.models.jax_folders.recognised import NAMES, problems_of, recognised
from specjax.models.llama import LlamaLM
from specjax.models.loading_bar import bar
from specjax.models.model_config import EmbeddingConfig
from specjax.models.orbax_folder import check_database
from specjax.models.weights import listed

_TOGETHER = 64 << 20  # bytes of small arrays that are read together

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An Orbax checkpoint.

    Attributes:
      path: its folder.
      layout: the module of this package that describes it.
      arrays: its arrays, by the names that the layout has for them: each array's key in the checkpoint, and what Orbax
        says of it.
    """

    path: Path
    layout: Any
    arrays: dict[str, tuple[Key, Any]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its arrays."""
        return {name: tuple(own.shape) for name, (_, own) in self.arrays.items()}


def opened(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder, of which only the outline is read; None if it has none.

    Raises:
      ModelError: if it is damaged, or its names are those of no library that is known.
    """
    home = located(folder)
    if home is None:
        return None
    import orbax.checkpoint as ocp

    local = isinstance(home, Path)  # and not a bucket's
    path = home.absolute() if local else home
    with _readable(path):
        if local:
            check_database(path)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = flatten_dict(checkpointer.metadata(path).item_metadata.tree)
    arrays = {"/".join(key): (key, own) for key, own in tree.items() if hasattr(own, "shape")}
    if (found := recognised(arrays)) is not None:
        return Checkpoint(path, *found)
    raise ModelError(
        f"{path} is an Orbax checkpoint with the names of no library of {NAMES} ({listed(sorted(arrays)[:3])}): convert it to "
        "a Hugging Face folder with the library that wrote it"
    )


def with_vocabulary(lm: Any, checkpoint: Checkpoint) -> Any:
    """The model, with as many tokens as the checkpoint has rows where these are fewer. Hugging Face's folders of Gemma 3
    have further rows, of tokens that no text has."""
    if not isinstance(lm, LlamaLM):
        raise ModelError(f"{checkpoint.path}: {checkpoint.layout.NAME} has no such model as its config.json describes")
    rows = checkpoint.shapes[checkpoint.layout.EMBEDDING][0]
    fewer = lm.config.every(EmbeddingConfig, vocab_size=min(rows, lm.config.vocab_size))
    return dataclasses.replace(lm, config=fewer)


def restore(checkpoint: Checkpoint, title: str, lm: Any, abstract: Any, places: Any = None) -> Any:
    """Every parameter on its sharding.

    Args:
      checkpoint: what `opened` returned.
      title: the model's name, for the bar.
      lm: the model.
      abstract: the params pytree as `ShapeDtypeStruct`s.
      places: a pytree of shardings like `abstract`; None: the default device.

    Raises:
      ModelError: naming every parameter that is missing or misshapen and every array that is unknown; if the model's family
        is not read from this layout; or if the checkpoint is damaged.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    names = [".".join(str(key.key) for key in path) for path, _ in leaves]
    wanted = dict(zip(names, (leaf for _, leaf in leaves), strict=True))
    where = dict(zip(names, [None] * len(leaves) if places is None else tree.flatten_up_to(places), strict=True))
    parts = checkpoint.layout.parts(checkpoint.shapes, {name: leaf.shape for name, leaf in wanted.items()}, lm.config)
    _check(checkpoint, parts)
    of: dict[str, list[str]] = {}
    for name, part in parts.items():
        of.setdefault(part.name, []).append(name)
    found = {}
    with bar(f"loading {title}", len(wanted)) as advance:
        for stored, array in _read(checkpoint, list(of)):
            for name in of[stored]:
                leaf, part = wanted[name], parts[name]
                numbers = part.value(part.take(array)).reshape(leaf.shape)
                found[name] = _placed(numbers, leaf.dtype, where[name])
            advance(len(of[stored]))
    return jax.tree.unflatten(tree, [found[name] for name in names])


def _placed(numbers: np.ndarray, dtype: Any, place: Any) -> jax.Array:
    room = Room(numbers.shape, dtype, place)
    for box, buffer in room.buffers.items():
        buffer[...] = numbers[tuple(slice(*span) for span in box)].astype(dtype)
    return room.array()


def _check(checkpoint: Checkpoint, parts: dict[str, Any]) -> None:
    problems = problems_of(checkpoint.layout, checkpoint.shapes, parts)
    for stored in dict.fromkeys(part.name for part in parts.values() if part.name in checkpoint.arrays):
        kind = checkpoint.arrays[stored][1].dtype
        if not jnp.issubdtype(kind, jnp.floating):
            problems.append(f"{stored} has type {kind}, weights are floating-point numbers")
    if problems:
        raise ModelError(f"the checkpoint does not fit config.json: {listed(problems)}")


def _read(checkpoint: Checkpoint, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Whole arrays by their names, the largest first."""
    import orbax.checkpoint as ocp

    for group in _groups(checkpoint, names):
        keys = {checkpoint.arrays[name][0]: checkpoint.arrays[name][1] for name in group}
        item = unflatten_dict({key: jax.ShapeDtypeStruct(own.shape, own.dtype) for key, own in keys.items()})
        args = unflatten_dict({key: ocp.RestoreArgs(restore_type=np.ndarray) for key in keys})
        given = ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
        with _readable(checkpoint.path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arrays: dict[Any, Any] = flatten_dict(checkpointer.restore(checkpoint.path, args=given))
        for name in group:
            yield name, arrays.pop(checkpoint.arrays[name][0])


def _groups(checkpoint: Checkpoint, names: list[str]) -> Iterator[list[str]]:
    """Names of arrays to read together."""
    size = {name: math.prod(own.shape) * jnp.dtype(own.dtype).itemsize for name, (_, own) in checkpoint.arrays.items()}
    group: list[str] = []
    for name in sorted(names, key=lambda name: -size[name]):
        if group and sum(size[one] for one in group) + size[name] > _TOGETHER:
            yield group
            group = []
        group.append(name)
    yield group


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns a damaged checkpoint's errors, which are tensorstore's, JSON's or Orbax's, into a one-line error."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):  # no room for it, or another process died
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path} is not a whole Orbax checkpoint ({reason[:200]}); fetch it again") from error
