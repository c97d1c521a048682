"""Keeps compiled programs in the user's cache folder, so that a later process need not compile them again.

Imports only the standard library, and jax where it is set: tests call `folder` before jax is imported.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path

_LOG = logging.getLogger(__name__)
UNUSED_DAYS = 30
"""Days without use after which a program is deleted."""
_SHORTEST = 0.1  # seconds: a program that compiles faster than this is hardly faster to load
_PROBE = 1 << 16  # bytes: on a full disk no programs are kept


def caches() -> Path:
    """The platform's folder for files that programs can make again."""
    if sys.platform == "darwin":
        usual = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        usual = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        usual = Path.home() / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or usual)


def folder(parent: Path) -> Path:
    """The folder in `parent` for programs of this jaxlib, XLA's flags and this processor.

    A program compiled for another processor may use instructions that this one lacks.
    """
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().split("\n\n")[0].splitlines() if cpu.exists() else [platform.processor()]
    own = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))] or lines
    made_by = importlib.metadata.version("jaxlib"), os.environ.get("XLA_FLAGS", ""), *own
    return parent / hashlib.blake2b("\n".join(made_by).encode(), digest_size=8).hexdigest()


@functools.cache
def keep() -> None:
    """Makes jax keep the programs that it compiles from now on, and load those of earlier processes. Later calls do nothing.

    A user's own setting of `jax_compilation_cache_dir` or `jax_enable_compilation_cache` takes precedence. The
    environment variable `SPECJAX_CACHE` names another folder, or is `off`. If there are several processes, only the
    first one writes. If the folder cannot be written, there is one warning.
    """
    import jax

    own = lambda name: getattr(jax.config, name)
    asked = os.environ.get("SPECJAX_CACHE")
    if asked == "off" or own("jax_compilation_cache_dir") is not None or not own("jax_enable_compilation_cache"):
        return
    place = folder(Path(asked).expanduser() if asked else caches() / "specjax")
    try:
        place.mkdir(parents=True, exist_ok=True)
        _sweep(place.parent)
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(_PROBE))
    except OSError as error:
        _LOG.warning(
            f"compiled programs are not kept, since {place} cannot be written ({error.strerror}): set SPECJAX_CACHE to "
            "another folder, or to off"
        )
    if not place.is_dir():
        return
    jax.config.update("jax_compilation_cache_dir", str(place))
    shortest = "jax_persistent_cache_min_compile_time_secs"
    if shortest.upper() not in os.environ and own(shortest) == 1.0:  # jax's own
        jax.config.update(shortest, _SHORTEST)
    # a program that cannot be read because another process is writing it is compiled; one that cannot be written is used by
    # this process alone
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")


def _sweep(parent: Path) -> None:
    """Deletes programs that have not been used for long, and the remains of interrupted writes."""
    for file in parent.glob("*/*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete the same ones
            found = file.stat()
            if not found.st_size or time.time() - max(found.st_atime, found.st_mtime) > UNUSED_DAYS * 86400:
                file.unlink()
