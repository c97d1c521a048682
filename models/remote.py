"""Models at the URLs that fsspec reads (`gs://`, `s3://`, ...): their files are fetched into the user's cache folder, once.

Orbax checkpoints of other libraries in a bucket are not fetched: Orbax reads them where they are.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.jax_folders.place import FILES, ITEMS
from specjax.programs import caches

_READ_IN_PLACE = ("gs://", "s3://")  # which both etils and Orbax read
_OF_CHECKPOINTS = {str(PurePosixPath(inside, name)) for inside in (*ITEMS, "params") for name in FILES}
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs"}
_VERSIONS = ("md5Hash", "md5", "etag", "ETag", "generation", "LastModified", "mtime", "updated", "created")
_NOTE = ".fetched.json"


def is_url(asked: Any) -> bool:
    """Whether something is given as a URL: a string, or a path object such as `etils.epath.Path("gs://...")`."""
    return isinstance(asked, (str, os.PathLike)) and "://" in os.fspath(asked)


def fetched(url: str, patterns: Iterable[str]) -> Path:
    """The local copy of a folder's files that match one of the patterns; those in subfolders are left out.

    A file is fetched again if its size or its version in the file system has changed, and deleted here if it is gone there.

    Raises:
      ModelError: if fsspec or the package for such URLs is not installed, or if there is nothing at the URL or it cannot
        be read.
    """
    fits = lambda name: "/" not in name and any(fnmatch.fnmatch(name, one) for one in patterns)
    there = _listed(url)
    _forget(url, there)
    return _fetched(url, {name: said for name, said in there.items() if fits(name)})


def checkpoint(url: str) -> Path | None:
    """The folder of an Orbax checkpoint; None if the URL is of none.

    One of another library is read in its bucket. Our own, and those in other file systems, are fetched.

    Raises:
      ModelError: see `fetched`.
    """
    there = _listed(url)
    if not _OF_CHECKPOINTS & there.keys():
        return None
    if url.startswith(_READ_IN_PLACE) and not any(name.startswith("params/") for name in there):
        from etils import epath

        return epath.Path(url)  # pyrefly: ignore[bad-return]
    _forget(url, there)
    return _fetched(url, there)


def file(url: str) -> Path:
    """The local copy of a file; see `fetched`."""
    parent, _, name = url.rpartition("/")
    with reading(url):
        files, path = opened(url)
        said = files.info(path)
        if said["type"] != "file":
            raise FileNotFoundError
    return _fetched(parent, {name: said}) / name


def opened(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
      ModelError: if fsspec or the package for such URLs is not installed, or if there is none.
    """
    scheme = url.partition("://")[0]
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        known = f"pip install fsspec {_PACKAGES[scheme]}" if scheme in _PACKAGES else str(error)
        raise ModelError(f"URLs of {scheme}:// need packages that are not installed: {known}") from error
    except ValueError as error:
        raise ModelError(f"{url}: fsspec knows no file system {scheme}:// ({error})") from error


def home(url: str) -> Path:
    """The folder in the user's cache for the files of a folder at a URL; it has that folder's name."""
    asked = os.environ.get("SPECJAX_CACHE")
    own = None if asked in (None, "", "off") else Path(str(asked)).expanduser()
    plain = url.rstrip("/")
    return (own or caches() / "specjax") / "urls" / hashlib.sha256(plain.encode()).hexdigest()[:16] / Path(plain).name


def _listed(url: str) -> dict[str, dict[str, Any]]:
    """What the file system says of the files in a folder, by their names in it."""
    with reading(url):
        files, path = opened(url)
        root = path.rstrip("/") + "/"
        found = {name.removeprefix(root): said | {"name": name} for name, said in files.find(path, detail=True).items()}
        if not found:
            raise FileNotFoundError
    return found


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Turns failures of a file system into a one-line error."""
    try:
        yield
    except ModelError:
        raise
    except FileNotFoundError as error:
        raise ModelError(f"there is nothing at {url}") from error
    except Exception as error:  # which errors a file system raises depends on it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{url} cannot be read ({reason[:200]}); check address, network and rights") from error


def _noted(own: Path) -> dict[str, Any]:
    """The versions of the fetched files in a local copy, by name."""
    try:
        return json.loads((own / _NOTE).read_text())
    except (OSError, ValueError):
        return {}


def _forget(url: str, there: Iterable[str]) -> None:
    """Deletes the fetched files that are no longer in the folder. A stale index would name shards of another model."""
    own = home(url)
    for name in _noted(own).keys() - set(there):
        (own / name).unlink(missing_ok=True)


def _fetched(url: str, wanted: dict[str, dict[str, Any]]) -> Path:
    """The local copy of a folder, in which these files are up to date."""
    own = home(url)
    note, noted = own / _NOTE, _noted(own)
    for name, said in sorted(wanted.items()):
        version = [said["size"], *(str(said[key]) for key in _VERSIONS if said.get(key) is not None)]
        copy = own / name
        if noted.get(name) == version and copy.is_file() and copy.stat().st_size == said["size"]:
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        noted[name] = version
        with reading(url), tempfile.TemporaryDirectory(dir=own) as scratch:  # no part of a file is ever in its place
            opened(url)[0].get_file(said["name"], f"{scratch}/part")
            os.replace(f"{scratch}/part", copy)
            Path(scratch, "note").write_text(json.dumps(noted))
            os.replace(f"{scratch}/note", note)
    return own
