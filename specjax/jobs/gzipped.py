"""Prompts and records as gzip files of JSON lines. A job writes plain lines first, and compresses them at its end."""

import gzip
import os
import zlib
from collections.abc import Iterator

from specjax.jobs import jsonl
from specjax.models.on_disk import replace

_PART_BYTES = 1 << 20


def check() -> None:
    """Does nothing: gzip needs no package."""


def read(path: str | os.PathLike[str], form: jsonl.Form | None = None) -> Iterator[jsonl.Line]:
    """Yields the lines of a file; see `jsonl.read`.

    Raises:
      ValueError: if the file is missing, truncated or not a gzip file.
    """
    try:
        with gzip.open(path) as file:
            yield from jsonl.parse_all(file, form)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read the input file {str(path)!r}: {error}") from error


def write(path: str | os.PathLike[str], journal: str | os.PathLike[str]) -> None:
    """Compresses a file of JSON lines atomically.

    Raises:
      OSError: if that fails.
    """
    replace(path, _compressed(journal))


def _compressed(journal: str | os.PathLike[str]) -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=31)  # gzip format, without a name or a time
    with open(journal, "rb") as lines:
        while part := lines.read(_PART_BYTES):
            yield packer.compress(part)
    yield packer.flush()
