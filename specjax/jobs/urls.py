"""Prompts and records at the URLs that fsspec reads and writes (`gs://`, `s3://`, ...). A job writes JSON lines into the user's
cache folder first, and the output at its end."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from specjax.jobs import jsonl
from specjax.models import remote


def read(path: str, kind: ModuleType, form: jsonl.Form | None = None) -> Iterator[jsonl.Line]:
    """The lines of a file at a URL, which is fetched; see `jsonl.read`.

    Args:
      path: the URL.
      kind: the module that reads such a file.
      form: see `jsonl.read`.

    Raises:
      ValueError: if the file is missing or cannot be read.
    """
    return kind.read(remote.file(path), form)


def journal(output: str) -> str:
    """The local file to which records are appended; the same command goes on from it on this machine."""
    parent, _, name = output.rpartition("/")
    return str(remote.home(parent) / f"{name}.jsonl")


def check(output: str) -> None:
    """Raises ValueError if the file system of the output is not installed, or the output exists and no job goes on."""
    files, path = remote.opened(output)
    lines = Path(journal(output))
    lines.parent.mkdir(parents=True, exist_ok=True)
    with remote.reading(output):
        exists = not lines.exists() and files.exists(path)
    if exists:
        raise ValueError(f"the output file {output!r} exists: move it away or choose another --output")


def write(output: str, lines: str | os.PathLike[str], kind: ModuleType | None) -> None:
    """Writes the output from the journal.

    Args:
      output: the URL.
      lines: the journal.
      kind: the module that writes such a file; None: JSON lines.

    Raises:
      OSError: if that fails.
    """
    whole = Path(f"{lines}.whole")
    if kind is None:
        shutil.copyfile(lines, whole)
    else:
        kind.write(whole, lines)
    try:
        files, path = remote.opened(output)
        files.put_file(str(whole), path)
    except Exception as error:  # which errors a file system raises depends on it
        raise OSError(0, str(error).strip() or type(error).__name__) from error
    finally:
        whole.unlink()
