"""Input in several files: a folder, a pattern such as `data/train-*.parquet`, or a dataset that Hugging Face's library
saved."""

import dataclasses
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from specjax.jobs import jsonl

Reader = Callable[[Path, jsonl.Form], Iterable[jsonl.Line]]
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".tar", ".tar.gz")
"""Of the files of a folder that are read; a pattern takes every file that it matches."""
DATASET, SPLITS = "state.json", "dataset_dict.json"
"""Files by which a saved dataset, and a folder of several, are known."""


def is_several(source: str) -> bool:
    """Whether an input is several files."""
    return Path(source).is_dir() or any(mark in source for mark in "*?[") and not Path(source).exists()


def takes(source: str, path: str) -> bool:
    """Whether a file, which need not exist, is or would be one of an input's files."""
    if not is_several(source):
        return False
    if Path(source).is_dir():
        return os.path.realpath(Path(path).parent) == os.path.realpath(source) and path.endswith(ENDINGS)
    return fnmatch(os.path.abspath(path), os.path.abspath(source))


def read(source: str, reader_of: Callable[[str], Reader], form: jsonl.Form | None) -> Iterator[jsonl.Line]:
    """The lines of all files, one after the other, numbered through.

    Args:
      source: a folder or a pattern.
      reader_of: from a file's name to the function that reads it.
      form: see `jsonl.read`.

    Raises:
      ValueError: if there is no file, or one cannot be read.
    """
    folder, own = Path(source), form or jsonl.from_object
    if (folder / SPLITS).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{DATASET}"))
        such = f"the datasets {', '.join(splits)}: name one, such as {source}/{splits[0]}" if splits else "no dataset"
        raise ValueError(f"--input {source!r} holds {such}")
    if (folder / DATASET).is_file():
        return _numbered([(path, _of_arrow) for path in _data_files(folder)], own)
    if folder.is_dir():
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name.endswith(ENDINGS)]
    else:
        files = [path for path in sorted(map(Path, glob.glob(source, recursive=True))) if path.is_file()]
    if not files:
        such = f" with the ending {', '.join(ENDINGS)}" if folder.is_dir() else ""
        raise ValueError(f"--input {source!r}: there is no file{such}")
    return _numbered([(path, reader_of(path.name)) for path in files], own)


def _numbered(files: list[tuple[Path, Reader]], form: jsonl.Form) -> Iterator[jsonl.Line]:
    before = 0
    for path, reader in files:
        within = lambda number, content, before=before: dataclasses.replace(
            form(before + number, content), number=number
        )
        last = 0
        for line in reader(path, within):
            where = f"{path.name}, line {line.number}: "
            yield dataclasses.replace(line, number=before + line.number, where=where)
            last = max(last, line.number)
        before += last


def _data_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / DATASET).read_text())
        return [folder / each["filename"] for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / DATASET)!r} does not describe a saved dataset: {error!r}") from error


def _of_arrow(path: Path, form: jsonl.Form) -> Iterator[jsonl.Line]:
    """The rows of a file in Arrow's format of streams."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ValueError("saved datasets need pyarrow: pip install 'specjax[parquet]'") from error
    try:
        with pyarrow.memory_map(str(path)) as file:
            yield from of_rows((row for batch in pyarrow.ipc.open_stream(file) for row in batch.to_pylist()), form)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read the input file {str(path)!r}: {error}") from error


def of_rows(rows: Iterable[dict[str, Any]], form: jsonl.Form) -> Iterator[jsonl.Line]:
    """Rows of a table as lines: columns are fields, and nulls are left out."""
    for number, row in enumerate(rows, start=1):
        yield _line(number, {name: value for name, value in row.items() if value is not None}, form)


def _line(number: int, row: dict[str, Any], form: jsonl.Form) -> jsonl.Line:
    try:
        json.dumps(row)
    except (TypeError, RecursionError) as error:
        return jsonl.Line(number, error=f"a value that JSON does not have: {error}")
    return form(number, row)
