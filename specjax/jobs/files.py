"""A job's input and output: lines in files of several kinds, standard input, and checks before any work."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Protocol

from specjax.jobs import batch_api, gzipped, jsonl, parquet, shards, tarred, urls
from specjax.jobs.options import PIPE
from specjax.jobs.output import Output, check, manifest_path
from specjax.jobs.spool import Spool
from specjax.jobs.work import FromLines, kept
from specjax.models.remote import is_url
from specjax.sharding.distributed import is_first
from specjax.terminal import BadInput, note

PACKED: dict[str, ModuleType] = {".parquet": parquet, ".tar.gz": tarred, ".gz": gzipped, ".tar": tarred}
"""File types that can only be written as a whole, by file ending: modules with `read`, `write` and `check`."""


def packed(path: str | None) -> ModuleType | None:
    """The module that reads and writes such a file, or None for plain lines."""
    return next((kind for ending, kind in PACKED.items() if path is not None and path.endswith(ending)), None)


class Writer(Protocol):
    """Writes an output as a whole from the records of a job."""

    def write(self, path: str | os.PathLike[str], journal: str | os.PathLike[str], /) -> None: ...


def journal(output: str, form: str | None = None) -> str:
    """The file to which records are appended: for a type or `--format` that can only be written as a whole, a file of JSON
    lines beside it; for a URL, one in the user's cache folder."""
    if form is not None:
        return batch_api.journal(output)
    if is_url(output):
        return urls.journal(output)
    return output if packed(output) is None else f"{output}.jsonl"


def finish(output: str, written: Output, writer: Writer | None = None) -> None:
    """Writes the output from its journal, if the two differ.

    Args:
      output: its name.
      written: the journal.
      writer: what writes it; None: what its name asks for.

    Raises:
      BadInput: if that fails.
    """
    kind: Writer | ModuleType | None = writer or packed(output)
    if kind is None and not is_url(output):
        return
    try:
        if is_url(output):
            urls.write(output, written.path, packed(output))
        elif kind is not None:
            kind.write(output, written.path)
    except OSError as error:
        raise BadInput(f"cannot write {output!r}: {error.strerror}; {written.path} holds every record") from error


def check_output(output: str, source: str | None, form: str | None = None) -> None:
    """Raises ValueError if the output cannot be written."""
    path, kind = Path(output), packed(output)
    if is_url(output):
        if output == source:
            raise ValueError("--output must not be the --input file")
        urls.check(output)
        check(journal(output))
        if kind is not None:
            kind.check()
        return
    if path.is_dir():
        raise ValueError(f"--output {output!r} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {output!r}: there is no folder {str(path.parent)!r}; make it first")
    if source and path.exists() and Path(source).exists() and path.samefile(source):
        raise ValueError("--output must not be the --input file")
    if output.endswith(".tar.gz"):
        raise ValueError("--output may be FILE.tar, and not FILE.tar.gz")
    lines = journal(output, form)
    if source and (shards.takes(source, output) or shards.takes(source, lines)):
        raise ValueError("--output must not be among the files of --input, which are all read")
    check(lines)
    if kind is not None:
        kind.check()
    if lines != output and path.exists() and not Path(lines).exists():
        raise ValueError(f"the output file {output!r} exists: move it away or choose another --output")


def check_beside(beside: Mapping[str, str | None], output: str | None, source: str | None, form: str | None) -> None:
    """Raises ValueError if a file that a job writes beside its records would be one of its other files.

    Args:
      beside: files, by the options that name them.
      output: see `check_output`.
      source: see `check_output`.
      form: see `check_output`.
    """
    taken = {} if source is None or source == PIPE or is_url(source) else {source: "the --input file"}
    if output is not None and not is_url(output):
        own = journal(output, form)
        taken |= {own: "the job's records", output: "the --output file", str(manifest_path(own)): "the job's manifest"}
    real = {os.path.realpath(path): what for path, what in taken.items()}
    for name, path in beside.items():
        if path is None:
            continue
        if (what := real.get(os.path.realpath(path))) is not None:
            raise ValueError(f"{name} must not be {what}")
        if source and shards.takes(source, path):
            raise ValueError(f"{name} must not be among the files of --input, which are all read")
        real[os.path.realpath(path)] = f"the {name} file"


def read_lines(options: FromLines, source: str, form: jsonl.Form | None = None) -> Spool[jsonl.Line]:
    """The lines of `--input`, in a spool.

    Args:
      options: of the command.
      source: its `--input`.
      form: see `jsonl.read`.

    Raises:
      ValueError: if no line is usable; with `--strict`, if one is not.
    """
    kind = packed(source)
    lines: Iterable[jsonl.Line]
    if source == PIPE:
        lines = jsonl.parse_all(_stdin(), form)
    elif is_url(source):
        lines = urls.read(source, kind or jsonl, form)
    elif shards.is_several(source):
        lines = shards.read(source, lambda name: (packed(name) or jsonl).read, form)
    else:
        lines = (kind or jsonl).read(source, form)
    unknown: set[str] = set()

    def seen() -> Iterator[jsonl.Line]:
        for line in lines:
            unknown.update(line.unknown)
            yield line

    found = kept(options, seen(), lambda line: None if line.error is None else (line.number, line.where + line.error))
    if unknown and is_first():
        note(f"{source}: fields without a meaning here are left out: {', '.join(map(repr, sorted(unknown)))}")
    return found


def _stdin() -> BinaryIO:
    """Standard input.

    Raises:
      ValueError: if it is a terminal or missing.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("nothing to complete: give PROMPT, --input FILE.jsonl, or text on stdin")
    return sys.stdin.buffer


def read_prompt() -> str:
    """Standard input as one prompt.

    Raises:
      ValueError: if it is missing or not text.
    """
    try:
        text = _stdin().read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text:
        raise ValueError("nothing to complete: give PROMPT, --input FILE.jsonl, or text on stdin (it is empty)")
    return text
