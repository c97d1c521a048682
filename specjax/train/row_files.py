"""Rows of token ids in `.npy` files with a record of their origin, so that text is tokenised once and read row by
row."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.jobs.manifest import fingerprint
from specjax.objectives.base import Kind
from specjax.train.packing import Make

_ABOUT, _SKIPPED = "rows.json", "skipped.json"
_ARRAYS = ("tokens", "mask", "documents")
_LABELS = "wrong"


Fields = dict[str, Any]
"""The arrays of `specjax.train.data.Rows`."""


def made_of(
    files: Sequence[Path],
    model: Any,
    length: int,
    seed: int,
    kind: Kind,
) -> dict[str, Any]:
    """The inputs on which rows depend, as JSON: the content of files, the tokenizer, packing, and the kind of lines."""
    return {
        "files": [[file.suffix, _hash(file)] for file in files],  # without folders, which may differ between processes
        "model": None if model.path is None else fingerprint(model.path),
        "length": length,
        "seed": seed,
        "packed": kind.packed,
        **({} if kind.lines == "text" else {kind.lines: True}),
    }


def kept(folder: Path, of: dict[str, Any]) -> Fields | None:
    """The rows in a folder, if they were made of `of`."""
    about = folder / _ABOUT
    if not about.is_file() or json.loads(about.read_text()) != of:
        return None
    return _read(folder)


def _read(folder: Path) -> Fields:
    names = (*_ARRAYS, *([_LABELS] if (folder / f"{_LABELS}.npy").exists() else []))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
    return arrays | {"skipped": tuple(json.loads((folder / _SKIPPED).read_text()))}


def written(folder: Path, of: dict[str, Any], write: Callable[[Path, Make], Sequence[str]]) -> Fields:
    """The rows that a function writes. They become the folder's content atomically.

    Args:
      folder: the rows' folder; rows that are there are replaced.
      of: see `made_of`.
      write: takes a scratch folder and a function that makes arrays there; returns the error of each unusable line.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(f"{folder}.tmp-{jax.process_index()}")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed run
    scratch.mkdir()
    try:
        skipped = write(scratch, functools.partial(_array, scratch))
        (scratch / _SKIPPED).write_text(json.dumps(list(skipped)))
        (scratch / _ABOUT).write_text(json.dumps(of))
        if (folder / _ABOUT).exists() and kept(folder, of) is None:
            shutil.rmtree(folder, ignore_errors=True)  # from another text
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(scratch, folder)
        if kept(folder, of) is None:
            raise ValueError(f"cannot write the rows of the data to {str(folder)!r}: it holds something else")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _read(folder)


def _array(scratch: Path, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.lib.format.open_memmap(scratch / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)


def _hash(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read the training data {str(file)!r}: {error.strerror or error}") from error
