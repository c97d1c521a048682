"""Files that are written whole or not at all, and have reached the disk."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors of a file system without fsync."""


def to_disk(file: int) -> None:
    """Flushes an open file or a folder to the disk, if its file system supports that.

    Raises:
      OSError: if it cannot be written.
    """
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def replace(path: str | os.PathLike[str], parts: Iterable[bytes]) -> None:
    """Writes a file atomically and flushes it to the disk.

    Args:
      path: the file.
      parts: the parts of its content.

    Raises:
      OSError: if that fails.
    """
    path = Path(path)
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        file.writelines(parts)
        file.flush()
        to_disk(file.fileno())
    os.replace(scratch, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        to_disk(folder)
    finally:
        os.close(folder)
