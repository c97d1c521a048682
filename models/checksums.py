"""Checksums of a checkpoint's files, kept beside it: damage is found before loading and reported in one line.

A few threads read files in pieces, and each of several processes reads a part. So a check reads a host's share of the
checkpoint once more, from memory where the system has it cached.
"""

import concurrent.futures
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import jax

from specjax.models.byte_ranges import READERS
from specjax.models.errors import ModelError
from specjax.models.fields import an_object
from specjax.models.json_file import read_json
from specjax.sharding import distributed

PIECE = 16 << 20
"""Bytes covered by one checksum."""


def write(folder: Path, part: str) -> None:
    """Records checksums of the files under `part` in `part.crc32.N.json` beside it. Each process N records the files
    that it wrote.

    Args:
      folder: the model's.
      part: the name of the checkpoint in the folder. The files that Orbax wrote in process N are in its
        `ocdbt.process_N`.
    """
    index, count = jax.process_index(), jax.process_count()
    others = {f"ocdbt.process_{i}" for i in range(count)} - {f"ocdbt.process_{index}"}
    home = folder / part
    files = sorted(file for file in home.rglob("*") if file.is_file())
    own = [file for file in files if file.relative_to(home).parts[0] not in others]
    if index:  # files that no single process wrote belong to the first process
        own = [file for file in own if file.relative_to(home).parts[0] == f"ocdbt.process_{index}"]
    spans = [(file, start) for file in own for start in range(0, file.stat().st_size, PIECE)]
    sums: dict[Path, list[str]] = {file: [] for file in own}
    for (file, _), value in zip(spans, _sums(spans), strict=True):
        sums[file].append(value)
    noted = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "crc32": values}
        for file, values in sums.items()
    }
    text = json.dumps({"piece": PIECE, "files": noted}, indent=1) + "\n"
    (folder / f"{part}.crc32.{index}.json").write_text(text)


def check(folder: Path, part: str, processes: Iterable[int] = ()) -> None:
    """Compares the files under `part` with the recorded checksums, if there are any.

    Args:
      folder: see `write`.
      part: see `write`.
      processes: the processes that call this together; they divide the work if they are all of the program's processes.

    Raises:
      ModelError: in all of these processes; names a file that is missing, changed or of another size.
    """
    together = len({*processes}) == jax.process_count() > 1
    index, count = (jax.process_index(), jax.process_count()) if together else (0, 1)
    problem = _problem(folder, part, index, count)
    if together and distributed.anywhere(problem is not None) and problem is None:
        problem = "another process found damage in it"
    if problem is not None:
        raise ModelError(f"{folder / part} is not a whole Orbax checkpoint ({problem}); save the model again")


def _problem(folder: Path, part: str, index: int, count: int) -> str | None:
    """The first damage found in every `count`th piece, starting at `index`."""
    spans: list[tuple[Path, int]] = []
    wanted: list[str] = []
    for note in sorted(folder.glob(f"{part}.crc32.*.json")):
        try:
            content = read_json(note)
            if content["piece"] != PIECE:
                return f"{note.name} has pieces of another size"
            for name, entry in an_object("files", content["files"]).items():
                file, size = folder / name, entry["bytes"]
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != size:
                    return f"{name} has {file.stat().st_size} bytes and had {size}"
                spans += [(file, start) for start in range(0, size, PIECE)]
                wanted += entry["crc32"]
        except (KeyError, TypeError, ValueError):
            return f"{note.name} is damaged"
    if len(wanted) != len(spans):
        return "its checksums are damaged"
    own = slice(index, None, count)
    for (file, _), was, found in zip(spans[own], wanted[own], _sums(spans[own]), strict=True):
        if was != found:
            return f"{file.relative_to(folder).as_posix()} has changed since it was written"
    return None


def _sums(spans: list[tuple[Path, int]]) -> list[str]:
    """The checksum of every piece."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(_sum, spans))


def _sum(span: tuple[Path, int]) -> str:
    file, start = span
    with open(file, "rb") as stream:
        stream.seek(start)
        return f"{zlib.crc32(stream.read(PIECE)):08x}"
