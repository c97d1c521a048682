"""A job's output file: each record is appended once, as it comes, and a killed job resumes where it was.

A manifest beside the file, `FILE.job.json`, describes the job. The file itself shows the progress: every complete line
is a finished record. A line without its newline was torn by a kill and is cut off.
"""

import contextlib
import json
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.jobs.jsonl import dumps, loads
from specjax.jobs.manifest import differences
from specjax.models.on_disk import replace, to_disk
from specjax.serve.request import Record, Request
from specjax.serve.score import Pair, Score

SYNC_RECORDS, SYNC_SECONDS = 8, 2.0
Item = Request | Record
_OWN: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Request, Record), ("finish_reason", "prompt", "id", "line", "sample")),
    **dict.fromkeys((Pair, Score), ("logprob", "prompt", "continuation", "id", "line")),
}
"""By the kind of an item: a field that all of its records have, and the fields that a record copies from its item."""


class OutputError(Exception):
    """The output file can no longer be written; the message is one line."""


def manifest_path(path: str | os.PathLike[str]) -> Path:
    """The path of an output's manifest."""
    return Path(f"{os.path.realpath(path)}.job.json")


def check(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if the output exists and cannot be resumed, because it has content and no manifest."""
    if _regular(path) and os.path.getsize(path) and not manifest_path(path).exists():
        raise ValueError(
            f"the output file {str(path)!r} exists, and there is no {manifest_path(path).name!r} beside it to go on from: "
            "move it away or choose another --output"
        )


def _regular(path: str | os.PathLike[str]) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


class Output:
    """An open output file.

    Records reach the disk (by fsync, if the file system supports it) every 8 records or 2 seconds, whichever is first.
    A device or a pipe is written directly; it has no manifest and cannot be resumed.

    Args:
      path: the file.
      manifest: the description of the job, JSON.
      items: everything for which the job writes a record, in the order of the input: requests and failed records, or
        pairs and failed scores.
      ordered: whether records are in that order.

    Attributes:
      done: by the index of every item that has a record already, whether it is an error record.
      resumable: whether it is a file, not a device or a pipe.

    Raises:
      ValueError: if the file belongs to another job (the message says what differs), has content that this job did not
        write, or is being written by another process.
      OSError: if it cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: dict[str, Any],
        items: Sequence[Item | Pair | Score],
        ordered: bool = True,
    ):
        self.path = str(path)
        self.done: dict[int, bool] = {}
        # if this process could also read from the pipe, the pipe would never break
        mode = os.O_RDWR | os.O_CREAT if _regular(path) or not os.path.exists(path) else os.O_WRONLY
        self._file = os.open(path, mode | os.O_CLOEXEC, 0o666)
        self.resumable = stat.S_ISREG(os.fstat(self._file).st_mode)
        self._size = self._unsynced = 0
        self._synced = time.monotonic()
        try:
            if self.resumable:
                _lock(self._file, self.path)
                if os.fstat(self._file).st_size:
                    self._go_on(manifest, items, ordered)
                else:
                    replace(manifest_path(path), [json.dumps(manifest, indent=2).encode() + b"\n"])
        except BaseException:
            os.close(self._file)
            raise

    def _go_on(self, manifest, items, ordered):
        check(self.path)
        kept = manifest_path(self.path)
        try:
            old = loads(kept.read_bytes())
        except ValueError:
            old = None
        if not isinstance(old, dict):
            raise ValueError(f"{str(kept)!r} is not the manifest of a job: move it and {self.path!r} away")
        wrong = differences(old, manifest)
        if wrong:
            raise ValueError(
                f"the output file {self.path!r} belongs to another job, which differs in {'; '.join(wrong)}: "
                "choose another --output, or move it and its .job.json away"
            )
        place = lambda item: _place(item.line, getattr(item, "sample", None))
        places = {} if ordered else {place(item): index for index, item in enumerate(items)}
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                record = _parse(line)
                index = number - 1 if ordered else places.get(_place(record.get("line"), record.get("sample")), -1)
                if not 0 <= index < len(items) or index in self.done or not _is_of(record, items[index]):
                    raise ValueError(
                        f"line {number} of the output file {self.path!r} is not a record of this job: it was changed; "
                        "move it and its .job.json away"
                    )
                self.done[index] = record.get("error") is not None
                self._size += len(line)
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)

    def append(self, record: Record | Score) -> None:
        """Writes one record.

        Raises:
          OutputError: if that fails; the file then still ends with a complete record.
        """
        rest = memoryview((dumps(record.to_json()) + "\n").encode())
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            if self.resumable:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size)
            raise self._failed(error) from error
        self._size += size
        self._unsynced += 1
        if self._unsynced >= SYNC_RECORDS:
            self.sync()

    def tick(self) -> None:
        """Flushes records that have waited long enough; call it now and then."""
        if self._unsynced and time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flushes everything to the disk.

        Raises:
          OutputError: if that fails.
        """
        try:
            if self.resumable:
                to_disk(self._file)
        except OSError as error:
            raise self._failed(error) from error
        self._unsynced, self._synced = 0, time.monotonic()

    def _failed(self, error: OSError) -> Exception:
        if isinstance(error, BrokenPipeError):
            return error
        return OutputError(f"cannot write the output file {self.path!r}: {error.strerror or error}")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _place(line: int | None, sample: int | None) -> tuple[int | None, int]:
    return line, sample or 0


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = loads(line)
    except ValueError:
        return {}
    named = isinstance(record, dict) and all(isinstance(record.get(key, 0), int | None) for key in ("line", "sample"))
    return record if named else {}


def _is_of(record: dict[str, Any], item: Item | Pair | Score) -> bool:
    always, *names = _OWN[type(item)]
    own = {name: getattr(item, name) for name in names}
    return always in record and json.loads(dumps(own)) == {name: record.get(name) for name in own}


def _lock(file: int, path: str) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another process is writing the output file {path!r}") from error
    except OSError:  # a file system without locks
        return
