"""`load` and `save`: Hugging Face folders, shipped models and hub ids in, Hugging Face folders out."""

import dataclasses
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import hf_config, tokenizer, weights
from specjax.models.errors import ModelError
from specjax.models.llama import LlamaLM

_PRETRAINED = Path(__file__).resolve().parent / "pretrained"
_DTYPES = ("float32", "bfloat16", "float16")
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Model:
    """What `load` returns.

    Attributes:
      lm: the model as functions of `params`.
      params: nested dicts of arrays, all in `dtype`.
      tokenizer: a transformers tokenizer, or None when the folder has none (ids still work).
      eos_ids: the end-of-sequence ids of `generation_config.json` and `config.json`; may be empty.
      name: what `load` was asked for, or the folder's name.
      path: the folder that was read.
      dtype: the type of the parameters.
    """

    lm: LlamaLM
    params: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    name: str
    path: Path
    dtype: Any


def shipped() -> dict[str, Path]:
    """The models that come with the package: name to folder."""
    return {file.parent.name: file.parent for file in sorted(_PRETRAINED.glob("*/config.json"))}


def resolve_dtype(dtype: Any = None) -> Any:
    """A parameter type; None is float32 on a CPU and bfloat16 elsewhere.

    Raises:
      ModelError: on anything but float32, bfloat16 and float16.
    """
    if dtype is None:
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; choose {', '.join(_DTYPES)}")
    return jnp.dtype(name)


def load(folder_or_hub_id: str | os.PathLike[str], dtype: Any = None, mesh: jax.sharding.Mesh | None = None) -> Model:
    """Reads a model: a Hugging Face folder, the name of a shipped model, or a Hugging Face hub id.

    Args:
      folder_or_hub_id: a folder goes before a shipped name, and that before the hub.
      dtype: the type of the parameters; None is float32 on a CPU and bfloat16 elsewhere.
      mesh: places every parameter by `specjax.sharding.rules`, reading only the slices of this host's shards.

    Raises:
      ModelError: (a ValueError) when there is no such model, the folder is incomplete, the architecture is not
        supported, or weights and `config.json` disagree.
    """
    dtype = resolve_dtype(dtype)
    name, folder = find(folder_or_hub_id, shipped(), "model")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{folder} has no config.json; give a Hugging Face model folder")
    raw = read_json(config_file)
    try:
        lm = LlamaLM(hf_config.from_hf(raw))
    except ModelError:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"{config_file} has a field of the wrong kind: {error}") from error
    if lm.config.head_dim % 2:
        raise ModelError(f"{config_file}: head_dim must be even, got {lm.config.head_dim}")
    abstract = lm.abstract(dtype)
    arrays = weights.match(weights.read_folder(folder), abstract, lm.config.tie_word_embeddings)
    if mesh is None:
        params = jax.tree.map(lambda array: weights.place(array, dtype, None), arrays)
    else:
        from specjax.sharding import rules

        shardings = rules.shardings(mesh, lm.axes(abstract), abstract, lm.axis_counts())
        params = jax.tree.map(lambda array, sharding: weights.place(array, dtype, sharding), arrays, shardings)
    return Model(lm, params, tokenizer.load(folder), _eos_ids(folder, raw), name, folder, dtype)


def save(
    folder: str | os.PathLike[str],
    lm: LlamaLM,
    params: Any,
    dtype: Any = None,
    tokenizer: Any = None,
    eos_ids: tuple[int, ...] = (),
) -> None:
    """Writes a folder that `load` and `transformers.AutoModelForCausalLM` open.

    Every file is written beside its final place and then renamed; an older file of the same name is replaced.

    Args:
      folder: created where needed.
      lm: the model.
      params: its parameters.
      dtype: the type to write; None keeps each parameter's own.
      tokenizer: a transformers tokenizer, or None.
      eos_ids: end-of-sequence ids for both config files.

    Raises:
      ModelError: when no supported architecture expresses the config, on a bad `dtype`, or when `folder` is a file.
    """
    dtype = None if dtype is None else resolve_dtype(dtype)
    ids = [int(i) for i in eos_ids]
    eos = {"eos_token_id": None if not ids else ids[0] if len(ids) == 1 else ids}
    bos = {"bos_token_id": getattr(tokenizer, "bos_token_id", None)}
    written = jnp.dtype(jax.tree.leaves(params)[0].dtype if dtype is None else dtype)
    config = {**hf_config.to_hf(lm.config), **bos, **eos, "torch_dtype": written.name}

    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; give a folder to save to")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        weights.write(scratch / "model.safetensors", params, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        for name, content in (("generation_config.json", bos | eos), ("config.json", config)):
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
        folder.mkdir(exist_ok=True)
        for file in sorted(scratch.iterdir(), key=lambda file: file.name == "config.json"):  # config.json comes last
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def find(asked: str | os.PathLike[str], ours: dict[str, Path], what: str) -> tuple[str, Path]:
    """Name and folder of what was asked for: a folder goes before a shipped name, and that before a hub id.

    Raises:
      ModelError: where there is no such thing; `what` says what was looked for.
    """
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
        return name, _download(name, what)
    known = f"one of the shipped ones ({', '.join(ours)})" if ours else "a shipped one"
    raise ModelError(f"unknown {what} {name!r}: no such folder; give a folder, {known} or a hub id such as owner/name")


def _download(hub_id: str, what: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # which client library raises depends on the version of huggingface_hub
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"unknown {what} {hub_id!r}: no such folder, and the Hugging Face hub did not give it ({reason}); "
            "check the name and the network, or give a folder"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ModelError: where there is none.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    ids: dict[int, None] = {}
    for content in ([read_json(generation)] if generation.is_file() else []) + [config]:
        eos = content.get("eos_token_id")
        for i in eos if isinstance(eos, list) else [] if eos is None else [eos]:
            if not isinstance(i, int) or i < 0:
                raise ModelError(f"{folder}: eos_token_id must be token ids, not {eos!r}")
            ids[i] = None
    return tuple(ids)
