"""Retrieval datastores on disk: a folder of `config.json` (with the vocabulary that it is for) and `model.safetensors`."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from specjax.draft.heads.folder import shipped_heads
from specjax.models import hub
from specjax.models.errors import ModelError
from specjax.models.fields import an_object
from specjax.models.json_file import read_json

NAME = "rest"
_AGAIN = "build one for it: `specjax datastore build FILES... --model TARGET --output FOLDER`"


def fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary: if it is equal, equal ids mean equal tokens."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=8).hexdigest()


def save_datastore(
    folder: str | os.PathLike[str], store: dict[str, Any], name: str, vocab_size: int, tokenizer: Any
) -> None:
    """Writes a datastore (`specjax.draft.datastore.build`); an older one in the folder is replaced.

    Args:
      folder: created if needed.
      store: the arrays.
      name: of the model whose tokenizer made it.
      vocab_size: of that model.
      tokenizer: of that model, or None.

    Raises:
      ModelError: if `folder` is a file.
    """
    made_for = {
        "name": name,
        "vocab_size": vocab_size,
        "tokenizer": None if tokenizer is None else fingerprint(tokenizer),
    }
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; give a folder to save to")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".datastore-", dir=folder) as scratch:
        arrays = {key: np.ascontiguousarray(array) for key, array in store.items()}
        Path(scratch, "model.safetensors").write_bytes(
            save(arrays)
        )  # save_file would make it readable by its owner only
        Path(scratch, "config.json").write_text(json.dumps({"drafter": NAME, "target": made_for}, indent=2) + "\n")
        for file in ("model.safetensors", "config.json"):  # config.json comes last
            os.replace(Path(scratch, file), folder / file)


def load_datastore(asked: str | os.PathLike[str], target: Any, mesh: jax.sharding.Mesh | None = None) -> dict[str, Any]:
    """A datastore for a target.

    Args:
      asked: a folder, the name of a shipped datastore, or a hub id.
      target: from `specjax.models.load`.
      mesh: where to place it, a copy on every device.

    Raises:
      ModelError: (a ValueError) if there is none, it is damaged, or it was built for another vocabulary.
    """
    told = lambda folder: read_json(folder / "config.json")
    ours = {name: folder for name, folder in shipped_heads().items() if told(folder).get("drafter") == NAME}
    title, folder = hub.find(asked, ours, "datastore")
    config = told(folder)
    if config.get("drafter") != NAME:
        raise ModelError(f'{title} is not a datastore (its config.json has another "drafter"); {_AGAIN}')
    made_for, vocab = an_object("target", config.get("target")), target.lm.vocab_size
    if made_for.get("vocab_size") != vocab:
        raise ModelError(
            f"the datastore {title} is for a vocabulary of {made_for.get('vocab_size')} tokens, and {target.name} has "
            f"{vocab}; {_AGAIN}"
        )
    hashed = made_for.get("tokenizer")
    if target.tokenizer is not None and hashed is not None and hashed != fingerprint(target.tokenizer):
        raise ModelError(
            f"the datastore {title} was built with the tokenizer of {made_for.get('name')!r}, and {target.name} has another "
            f"of the same size; {_AGAIN}"
        )
    store = {key: jnp.asarray(array) for key, array in _read(folder / "model.safetensors", vocab).items()}
    if mesh is None:
        return store
    return jax.device_put(store, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def _read(file: Path, vocab_size: int) -> dict[str, np.ndarray]:
    try:
        store = load_file(file)
        tokens, suffixes = store["tokens"], store["suffixes"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"{file} is missing or damaged; build or fetch the datastore again") from error
    shaped = tokens.ndim == suffixes.ndim == 1 and tokens.size > 2 and suffixes.size > 0
    typed = tokens.dtype in (np.uint16, np.int32) and suffixes.dtype == np.int32
    if not shaped or not typed or suffixes.min() < 1 or suffixes.max() >= tokens.size:
        raise ModelError(f"{file} does not hold a datastore's arrays; build or fetch it again")
    if tokens.min() < 0 or tokens.max() != vocab_size or tokens[0] != vocab_size or tokens[-1] != vocab_size:
        raise ModelError(f"{file} has tokens outside the vocabulary of {vocab_size}; build or fetch it again")
    return {"tokens": tokens, "suffixes": suffixes}
