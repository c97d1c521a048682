"""The files of a head's folder.

Read: safetensors or, if torch is installed, its own format; whole or in shards. Written: safetensors.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from specjax.models.errors import ModelError
from specjax.models.json_file import read_json
from specjax.models.tensors import read_folder, read_header
from specjax.models.weights import without_cache_scales

STEMS = ("model", "pytorch_model")
"""Names of files with a head's weights, in addition to those that a layout has for its own."""
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")  # buffers that old checkpoints carry; we compute them


def config_file(folder: Path) -> Path:
    """The description of a head: its `config.json`, or PEFT's `adapter_config.json` if there is no other."""
    peft = folder / "adapter_config.json"
    return peft if peft.is_file() and not (folder / "config.json").is_file() else folder / "config.json"


def torch_files(stems: Sequence[str]) -> tuple[str, ...]:
    """Patterns of files in torch's own format that hold a head with these stems, and not the state of its training."""
    return (*(f"{stem}{suffix}" for stem in stems for suffix in (".bin", ".pt")), "pytorch_model-*.bin")


def read_tensors(folder: Path, stems: Sequence[str] = STEMS, together: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Tensors by name. Safetensors take precedence over torch's format, and one file over shards.

    Args:
      folder: of the head.
      stems: possible names of its files.
      together: names of files that hold it together, if the first of them is there.

    Raises:
      ModelError: if there are none, a shard is missing, a file is damaged, or torch is needed and absent.
    """
    parts = together if together and any(_files(folder, together[:1])) else ()
    found = _read_together(folder, parts) if parts else _read(folder, stems)
    return without_cache_scales({name: x for name, x in found.items() if not _HARMLESS.search(name)})[0]


def write_files(folder: str | os.PathLike[str], config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes `model.safetensors`, then `config.json`; older ones in the folder are replaced.

    Args:
      folder: created if needed.
      config: the contents of `config.json`.
      tensors: in the types to write.

    Raises:
      ModelError: if `folder` is a file.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; give a folder to save to")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".head-", dir=folder))
    try:
        (scratch / "model.safetensors").write_bytes(save(dict(tensors), {"format": "pt"}))
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in ("model.safetensors", "config.json"):
            os.replace(scratch / file, folder / file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _files(folder: Path, stems: Sequence[str]) -> Iterator[Path]:
    """The files of these stems that are there, those in safetensors first."""
    names = [f"{stem}{suffix}" for suffix in (".safetensors", ".bin", ".pt") for stem in stems]
    return (folder / name for name in names if (folder / name).is_file())


def _read_together(folder: Path, stems: Sequence[str]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for stem in stems:
        file = next(_files(folder, (stem,)), None)
        if file is None:
            raise ModelError(
                f"{folder} lacks {stem}, one of the files that hold this head: {', '.join(stems)}; fetch it"
            )
        own = _read_safe(file) if file.suffix == ".safetensors" else _read_torch(file)
        if both := sorted(own.keys() & tensors.keys()):
            raise ModelError(f"{file} has the tensor {both[0]}, which another file of the head has too")
        tensors |= own
    return tensors


def _read_safe(file: Path) -> dict[str, np.ndarray]:
    return {name: tensor.array() for name, tensor in read_header(file).items()}


def _read(folder: Path, stems: Sequence[str]) -> dict[str, np.ndarray]:
    for stem in stems:
        file = folder / f"{stem}.safetensors"
        if file.is_file():
            return _read_safe(file)
    if (folder / "model.safetensors.index.json").is_file():
        return {name: tensor.array() for name, tensor in read_folder(folder).items()}
    for stem in stems:
        for suffix in (".bin", ".pt"):
            if (folder / f"{stem}{suffix}").is_file():
                return _read_torch(folder / f"{stem}{suffix}")
    index = folder / "pytorch_model.bin.index.json"
    if index.is_file():
        return _read_torch_shards(index)
    names = ", ".join(f"{stem}.safetensors" for stem in stems)
    raise ModelError(
        f"{folder} holds no weights of a head: looked for {names}, model.safetensors.index.json, and for .bin and .pt files of "
        "these names"
    )


def _read_torch_shards(index: Path) -> dict[str, np.ndarray]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ModelError(f"{index} is malformed: it needs a weight_map from tensor names to files")
    shards = sorted({str(shard) for shard in places.values()})
    absent = [shard for shard in shards if Path(shard).name != shard or not (index.parent / shard).is_file()]
    if absent:
        raise ModelError(f"{index} names files that are not in the folder: {', '.join(absent)}; fetch them")
    tensors: dict[str, np.ndarray] = {}
    for shard in shards:
        tensors |= _read_torch(index.parent / shard)
    return tensors


def _read_torch(file: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError as error:
        raise ModelError(f"{file} needs torch to be read: install it, or convert the file to safetensors") from error
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own message asks the user to turn its guard off
        raise ModelError(
            f"{file} is damaged, or holds more than weights, which is never read; convert it to safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(x, torch.Tensor) for x in found.values()):
        raise ModelError(f"{file} holds other things than named tensors; convert it to safetensors")
    array = lambda x: (x.float() if x.is_floating_point() else x).numpy()
    return {name: array(x) for name, x in found.items()}
