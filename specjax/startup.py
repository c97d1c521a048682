"""Checks before jax is imported: that the package is whole and the command line has no unknown names. Silences a CUDA
plugin without a GPU.

Imports only the standard library, and modules that import no more than that.
"""

import contextlib
import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax import flags, names

_LINKS = ("kernels", "models", "sharding")
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")  # Linux, Linux on Windows, Jetson
_REMARKS = re.compile(rb"Could not find cuda drivers|All log messages before absl::InitializeLog")


def check_links(folder: Path) -> None:
    """Raises ImportError if a checkout of the package `folder` has other things in place of its symbolic links."""
    for name in _LINKS:
        path = folder / name
        if path.is_file() or (path.is_symlink() and not path.exists()):
            raise ImportError(
                f"{path} should be a symbolic link to the folder ../{name} and is not: this checkout was made without symbolic "
                "links. Check it out again with `git clone -c core.symlinks=true` (on Windows in developer mode), or install a "
                "wheel instead"
            )


def check_words(words: Sequence[str] | None) -> None:
    """Ends the process with one line and exit status 2 if a `specjax` command line has an unknown name.

    Args:
      words: from `command_line`.
    """
    if words and (wrong := names.wrong_word(words, flags.of_commands())):
        print(f"specjax: error: {wrong}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def command_line() -> list[str] | None:
    """The words after `specjax` or `python -m specjax` if this process runs that and imports the package; otherwise None."""
    program = sys.argv[:1]
    if program == ["-m"]:
        at = sys.orig_argv.index("-m") if "-m" in sys.orig_argv else -2
        return sys.argv[1:] if sys.orig_argv[at + 1 : at + 2] == ["specjax"] else None
    return sys.argv[1:] if program and Path(program[0]).name in ("specjax", "specjax.exe") else None


def spare_plugin() -> bool:
    """Whether JAX's CUDA plugin is installed on a machine without an NVIDIA driver, in order to compile for machines
    with one.
    """
    no_driver = not any(os.path.exists(path) for path in _DRIVERS)
    return no_driver and any(importlib.util.find_spec(name) is not None for name in _PLUGINS)


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Around the import of jax: hides the native code's remarks about a plugin without a driver.

    No setting of JAX controls them. Everything else that is written to stderr meanwhile is shown at the end.
    """
    try:
        shown = os.dup(2) if "jax" not in sys.modules and spare_plugin() else None
    except OSError:  # stderr is closed
        shown = None
    if shown is None:
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(shown, 2)
            os.close(shown)
            said.seek(0)
            for line in said:
                if not _REMARKS.search(line):
                    os.write(2, line)


def no_spare_plugin(record: logging.LogRecord) -> bool:
    """A filter for JAX's log that drops its traceback about such a plugin."""
    return not ("xla_cuda" in record.getMessage() and spare_plugin())
