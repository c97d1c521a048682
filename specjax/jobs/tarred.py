"""Prompts and records in tar files of samples, as WebDataset has them: files with one name before the first dot are a sample.

Of a sample, `NAME.json` is a line, and `NAME.txt` is its prompt. A job writes JSON lines first, and packs them at its end.
"""

import os
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath

from specjax.jobs import jsonl
from specjax.models.on_disk import replace


def check() -> None:
    """Does nothing: tar needs no package."""


def read(path: str | os.PathLike[str], form: jsonl.Form | None = None) -> Iterator[jsonl.Line]:
    """Yields the samples of a file as lines, in its order; see `jsonl.read`.

    Raises:
      ValueError: if the file is missing or not a tar file.
    """
    try:
        with tarfile.open(path) as file:
            for number, parts in enumerate(_samples(file), start=1):
                yield _line(number, parts, form or jsonl.from_object)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ValueError(f"cannot read the input file {str(path)!r}: {error}") from error


def _samples(file: tarfile.TarFile) -> Iterator[dict[str, bytes]]:
    """Yields the contents of every sample by the ending of its files, `json` or `txt`. Files of a sample follow each other."""
    parts: dict[str, bytes] = {}
    before = None
    for member in file:
        where = PurePosixPath(member.name)
        name, _, ending = where.name.partition(".")
        if not member.isfile():
            continue
        if (sample := where.parent / name) != before or ending in parts:
            if before is not None:
                yield parts
            parts, before = {}, sample
        if ending in ("json", "txt"):
            content = file.extractfile(member)
            assert content is not None  # it is a file
            parts[ending] = content.read()
    if before is not None:
        yield parts


def _line(number: int, parts: dict[str, bytes], form: jsonl.Form) -> jsonl.Line:
    if not parts:
        return jsonl.Line(number, error="its sample has neither .json nor .txt")
    try:
        own = jsonl.loads(parts["json"].decode()) if "json" in parts else {}
        prompt = {"prompt": parts["txt"].decode()} if "txt" in parts else {}
    except UnicodeDecodeError as error:
        return jsonl.Line(number, error=f"not valid UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return jsonl.Line(number, error=f"not valid JSON: {error}")
    if not isinstance(own, dict):
        return jsonl.Line(number, error="its .json is not an object")
    return form(number, own | prompt)


def write(path: str | os.PathLike[str], journal: str | os.PathLike[str]) -> None:
    """Packs a file of records, atomically: each is a sample `RECORD.json`, named by its place.

    Raises:
      OSError: if that fails.
    """
    replace(path, _packed(journal))


def _packed(journal: str | os.PathLike[str]) -> Iterator[bytes]:
    with open(journal, "rb") as lines:
        for number, line in enumerate(lines):
            member = tarfile.TarInfo(f"{number:08}.json")
            member.size = len(line)
            padding = -len(line) % tarfile.BLOCKSIZE
            yield member.tobuf(tarfile.PAX_FORMAT) + line + bytes(padding)
    yield bytes(2 * tarfile.BLOCKSIZE)
