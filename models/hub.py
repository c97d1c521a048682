"""Where models lie: shipped ones, folders, GGUF files, and repositories of the Hugging Face hub."""

import contextlib
import difflib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from specjax.models import remote
from specjax.models.errors import ModelError
from specjax.models.gguf import finding
from specjax.models.tensors import INDEX, shards_of

_PRETRAINED = Path(__file__).resolve().parent / "pretrained"
_HUB_FILES = ("*.json", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_HUB_GGUF = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/([\w./-]+\.gguf)(@[\w./-]+)?")


def shipped() -> dict[str, Path]:
    """The models shipped with the package: a dict from name to folder."""
    return {file.parent.name: file.parent for file in sorted(_PRETRAINED.glob("*/config.json"))}


def located(asked: str | os.PathLike[str]) -> tuple[str, Path]:
    """The name of the requested model, and its folder or GGUF file; see `load`.

    Raises:
      ModelError: if there is none, or if there are several.
    """
    if remote.is_url(asked):
        return _at_url(os.fspath(asked))
    wanted = _HUB_GGUF.fullmatch(asked) if isinstance(asked, str) and not Path(asked).is_file() else None
    if wanted:
        return wanted[0], _gguf_file(f"{wanted[1]}{wanted[3] or ''}", wanted[2])
    if found := finding.located(asked):
        return found
    name, folder = find(asked, shipped(), "model")
    if "/" not in name or any(folder.glob("*.safetensors")):  # only a hub id has a slash
        return name, folder
    files = finding.of_models(_gguf_names(name, folder))
    if len(files) > 1:
        raise ModelError(
            f"{name} holds {len(files)} models, {', '.join(files)}: give one of them, as {_file_of(name, files[0])}"
        )
    return name, _gguf_file(name, files[0]) if files else folder


def described(asked: str | os.PathLike[str]) -> Path:
    """The `config.json` that `load` was given as `config`; of a hub repository, the small files are fetched.

    Raises:
      ModelError: if there is none.
    """
    if Path(asked).is_file():
        return Path(asked)
    if remote.is_url(asked) and os.fspath(asked).endswith(".json"):
        return remote.file(os.fspath(asked))
    file = find(asked, shipped(), "configuration", None)[1] / "config.json"
    if not file.is_file():
        raise ModelError(f"{file.parent} has no config.json: give another config")
    return file


def small_files(folder: Path) -> Path:
    """The folder with a model's configuration and tokenizer, which are fetched of one in a bucket; any other itself."""
    return find(os.fspath(folder), {}, "configuration", None)[1] if remote.is_url(folder) else folder


def find(
    asked: str | os.PathLike[str], ours: dict[str, Path], what: str, stems: tuple[str, ...] | None = ("model",),
    besides: tuple[str, ...] = (),
) -> tuple[str, Path]:  # fmt: skip
    """Resolves a request to a name and a folder. A folder takes precedence over a shipped name, and that over a hub id.

    Args:
      asked: one of these, or a folder's URL; a hub id may end with a branch, tag or commit (`owner/name@revision`).
      ours: the shipped folders by name.
      what: the noun that errors use for the thing.
      stems: of the safetensors files to fetch from the hub where no index names them; None: no weights are fetched.
      besides: patterns of files to fetch if the repository has none of those.

    Raises:
      ModelError: if there is no such thing.
    """
    if remote.is_url(asked):
        url = os.fspath(asked)
        whole = None if stems is None else remote.checkpoint(url)
        return Path(url).name, whole or _needed(functools.partial(remote.fetched, url), stems, besides)
    try:
        folder = Path(asked).expanduser()
    except RuntimeError:  # no such user
        folder = Path(asked)
    if folder.is_dir():
        return folder.resolve().name, folder
    name = str(asked)
    if name in ours:
        return name, ours[name]
    if isinstance(asked, str) and _HUB_ID.fullmatch(name):
        return name, _download(name, what, stems, besides)
    names = [*ours, *(finding.PACKAGES if what == "model" else ())]
    near = difflib.get_close_matches(name, names, 1)
    known = f", a name ({', '.join(names)})" if names else ""
    meant = f"; is {near[0]} meant?" if near else ""
    raise ModelError(
        f"unknown {what} {name!r}: no such folder; give a folder{known} or a hub id such as owner/name{meant}"
    )


def _download(hub_id: str, what: str, stems: tuple[str, ...] | None, besides: tuple[str, ...]) -> Path:
    """Downloads what is needed of a repository. Subfolders are left out: they hold the same weights again (`original/`)."""
    import huggingface_hub

    name, _, revision = hub_id.partition("@")

    def fetch(patterns: Iterable[str]) -> Path:
        kinds = {"allow_patterns": list(patterns), "ignore_patterns": ["*/*"]}
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, **kinds))

    with _from_the_hub(what, hub_id):
        return _needed(fetch, stems, besides)


def _needed(
    fetch: Callable[[Iterable[str]], Path], stems: tuple[str, ...] | None, besides: tuple[str, ...]
) -> Path:  # fmt: skip
    """Fetches the small files, and the weight files that the index names or, without an index, those of `stems`."""
    folder = fetch(_HUB_FILES)
    if stems is None:
        return folder
    files = shards_of(folder / INDEX) if (folder / INDEX).is_file() else [f"{stem}.safetensors" for stem in stems]
    folder = fetch(files)
    return fetch(besides) if besides and not any((folder / file).is_file() for file in files) else folder


def _at_url(url: str) -> tuple[str, Path]:
    """The name of a model at a URL, and the local copy of its folder or GGUF file."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if not name.endswith(".gguf"):
        return find(url, {}, "model")
    file = remote.fetched(parent, (finding.all_shards(name),)) / name
    if not file.is_file():
        raise ModelError(f"there is nothing at {url}")
    return file.stem, file


@contextlib.contextmanager
def _from_the_hub(what: str, asked: str) -> Iterator[None]:
    """Turns failures of the hub into a one-line error."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # which HTTP client raises depends on the version of huggingface_hub
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"unknown {what} {asked!r}: no such folder, and the Hugging Face hub did not give it ({reason}); "
            "check the name and the network, or give a folder"
        ) from error


def _file_of(hub_id: str, file: str) -> str:
    """The name by which `load` finds a file of a repository."""
    name, at, revision = hub_id.partition("@")
    return f"{name}/{file}{at}{revision}"


def _gguf_names(hub_id: str, folder: Path) -> list[str]:
    """The GGUF files of a repository, including its subfolders; without a network, those already downloaded. `folder`
    holds the repository's small files."""
    import huggingface_hub

    name, _, revision = hub_id.partition("@")
    try:
        files = huggingface_hub.list_repo_files(name, revision=revision or None)
    except Exception:  # see `_download`
        files = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    return [file for file in files if file.endswith(".gguf")]


def _gguf_file(hub_id: str, file: str) -> Path:
    """A GGUF file of a repository, with its shards."""
    import huggingface_hub

    name, _, revision = hub_id.partition("@")
    asked = _file_of(hub_id, file)
    with _from_the_hub("model", asked):
        wanted = finding.all_shards(file)
        found = Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=[wanted])) / file
    if not found.is_file():
        files = finding.of_models(_gguf_names(hub_id, found.parent))
        there = f"it has {', '.join(files)}" if files else "it has no GGUF file"
        raise ModelError(f"unknown model {asked!r}: {hub_id} has no such file; {there}")
    return found
