"""The target's outputs on training text, captured once: a folder of safetensors files with rows, and an index.

`index.json` is written first and describes all files (`rows-00000.safetensors` and so on). Each file is complete or
absent. It has as many rows as the index says; the last file has the remaining rows.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from specjax.jobs.manifest import differences, fingerprint, hash_json
from specjax.lm import Output, Wants
from specjax.models.on_disk import replace
from specjax.objectives.base import Objective

INDEX = "index.json"
_OWN = ("tokens", "mask", "documents")
_HIDDEN, _VALUES, _IDS = "hidden.", "topk.values", "topk.ids"


def said_by(target: Any) -> dict[str, Any]:
    """A JSON value that identifies the target.

    Args:
      target: what `specjax.models.load` returned.
    """
    return {
        "name": target.name,
        "files": None if target.path is None else fingerprint(target.path),
        "adapter": [fingerprint(folder) for folder in target.adapter],
        "weights": target.weights,
    }


def named(output: Output) -> dict[str, Any]:
    """The arrays of an output, by their names in files."""
    found = {f"{_HIDDEN}{layer}": x for layer, x in (output.hidden or {}).items()}
    found |= {} if output.final is None else {"final": output.final}
    return found | ({} if output.topk is None else dict(zip((_VALUES, _IDS), output.topk, strict=True)))


def _names(wants: Wants, top: bool) -> tuple[str, ...]:
    """The names of the arrays that an objective asks for, including its teacher's likeliest tokens or final
    features."""
    own = [f"{_HIDDEN}{layer}" for layer in wants.hidden] + ["final"] * (wants.final or not top)
    return tuple(own + [_VALUES, _IDS] * top)


@dataclasses.dataclass(frozen=True)
class Index:
    """The index of a folder of features.

    Attributes:
      target: see `said_by`.
      dtype: the target's type.
      data: the digest of the text's rows.
      rows: N.
      length: T.
      due: how many tokens are predicted.
      rows_per_file: the number of rows per file.
      arrays: the type of each array, and its shape without the axis of rows.
    """

    target: dict[str, Any]
    dtype: str
    data: str
    rows: int
    length: int
    due: int
    rows_per_file: int
    arrays: dict[str, list[Any]]

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """
        Raises:
          ValueError: if there is none.
        """
        try:
            return cls(**json.loads((folder / INDEX).read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"{str(folder)!r} holds no captured features: give a folder that `specjax capture` wrote"
            ) from error

    def write(self, folder: Path) -> None:
        """Writes the index atomically."""
        replace(folder / INDEX, [json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n"])

    def check_same(self, other: "Index", folder: Path) -> None:
        """Raises ValueError if a folder's index, `other`, differs from this one."""
        of = lambda index: dataclasses.asdict(index) | {"target": {**index.target, "name": None}}
        wrong = differences(of(other), of(self))
        if wrong:
            raise ValueError(
                f"{str(folder)!r} holds features of another capture, which differs in {'; '.join(wrong)}: choose another "
                "--output"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(jnp.dtype(kind).itemsize * int(np.prod(shape)) for kind, shape in self.arrays.values())

    def files(self) -> Iterator[tuple[str, range]]:
        """The name and the rows of every file."""
        for number, begin in enumerate(range(0, self.rows, self.rows_per_file)):
            yield f"rows-{number:05}.safetensors", range(begin, min(begin + self.rows_per_file, self.rows))


@functools.lru_cache(64)
def _opened(file: Path) -> Any:
    """A file whose arrays are memory-mapped."""
    return safe_open(file, framework="np")


def wanted(name: str, objective: Objective) -> Wants:
    """The part of a target's pass that an objective reads.

    Args:
      name: its drafter's name.
      objective: the objective.

    Raises:
      ValueError: if it runs layers of the target.
    """
    if objective.reads is None:
        raise ValueError(
            f"{name} runs the target's layers while it trains, so captured features do not suffice: give --data"
        )
    return objective.reads


def write_rows(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a file of rows `[n, ...]` atomically."""
    replace(file, [save({name: np.ascontiguousarray(array) for name, array in arrays.items()})])


@dataclasses.dataclass(frozen=True)
class Features:
    """Captured rows, from which batches are drawn. Only the bytes of the requested rows are read.

    Attributes:
      folder: the folder that `specjax capture` wrote.
      index: the folder's index.
      names: the names of the features that are read with a row.
      skipped: empty, since no lines are read.
    """

    folder: Path
    index: Index
    names: tuple[str, ...] = ()
    skipped: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, folder: Path, target: Any) -> "Features":
        """
        Args:
          folder: see the class.
          target: what `specjax.models.load` returned.

        Raises:
          ValueError: if the folder is incomplete, or of another target.
        """
        index, own = Index.read(folder), said_by(target)
        wrong = differences({**index.target, "name": None}, {**own, "name": None})
        if wrong:
            raise ValueError(
                f"{str(folder)!r} holds features of the target {index.target['name']!r}, and {own['name']!r} is another one "
                f"(they differ in {'; '.join(wrong)}): give that target, or capture its own"
            )
        missing = [name for name, _ in index.files() if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{str(folder)!r} is incomplete, {missing[0]} is missing: run the same `specjax capture` command again"
            )
        return cls(folder, index)

    def reading(self, name: str, objective: Objective) -> "Features":
        """The same rows, read with the features that an objective needs.

        Args:
          name: its drafter's name.
          objective: the objective.

        Raises:
          ValueError: if it runs layers of the target, or if the folder lacks features that it reads.
        """
        has = self.index.arrays
        names = _names(wanted(name, objective), _VALUES in has)
        lacking = [one for one in names if one not in has]
        if lacking:
            raise ValueError(
                f"{str(self.folder)!r} has no {lacking[0]}, which {name} reads; it has "
                f"{', '.join(one for one in has if one not in _OWN)}: capture with the drafter's line that you train"
            )
        return dataclasses.replace(self, names=names)

    @property
    def digest(self) -> str:
        """A hash of the text."""
        return self.index.data

    @property
    def due(self) -> int:
        """The number of tokens that are predicted."""
        return self.index.due

    @property
    def about(self) -> str:
        """A value that identifies what was captured."""
        return hash_json(dataclasses.asdict(self.index))[:16]

    def __len__(self) -> int:
        return self.index.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, at = divmod(index, self.index.rows_per_file)
        file = _opened(self.folder / f"rows-{number:05}.safetensors")
        take = lambda name: file.get_slice(name)[at]
        found = {name: take(name) for name in self.names}
        hidden = {int(name.removeprefix(_HIDDEN)): x for name, x in found.items() if name.startswith(_HIDDEN)}
        topk = (found[_VALUES], found[_IDS]) if _VALUES in found else None
        output = Output(None, topk=topk, hidden=hidden or None, final=found.get("final"))
        return {name: take(name) for name in _OWN} | {"output": output}

    def counts(self, size: int) -> np.ndarray:
        """`[size]`, how often each token is predicted."""
        total = np.zeros(size, int)
        for name, _ in self.index.files():
            file = _opened(self.folder / name)
            total += np.bincount(file.get_tensor("tokens")[file.get_tensor("mask")], minlength=size)
        return total
