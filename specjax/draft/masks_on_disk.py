"""The mask of a draft model on disk: its folder's `config.json` names it, by a key that depends on the method."""

from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import is_id
from specjax.models.json_file import read_json

PARD, GAD, LUD = "pard_token", "mask_token_id", "lud_pad"
"""The keys: AMD's for PARD and PARD-2, and this library's for GAD and LUD."""


def config_of(draft: Any) -> tuple[Any, dict[str, Any]]:
    """The `config.json` of a loaded model, and what it says; None and nothing if the model has no such file."""
    file = None if draft.path is None else draft.path / "config.json"
    return (file, read_json(file)) if file is not None and file.is_file() else (None, {})


def named_mask(draft: Any, key: str) -> int | None:
    """The id of the mask that a loaded model's folder names; None if it names none.

    A model of PARD-2 is read like one of PARD: it was also trained without the target's features.

    Raises:
      ModelError: if it is no token of the model.
    """
    file, config = config_of(draft)
    mask = config.get(key)
    if mask is not None and (not is_id(mask) or mask >= draft.lm.vocab_size):
        raise ModelError(f"{file}: {key} is {mask!r}, and the table of embeddings has {draft.lm.vocab_size} rows")
    return mask


def read_mask(draft: Any, key: str, method: str) -> int:
    """The same of a folder that must name one; `method` is the name by which it is trained.

    Raises:
      ModelError: see `named_mask`; and if it names none.
    """
    mask = named_mask(draft, key)
    if mask is None:
        raise ModelError(
            f"{draft.name!r} names no mask token ({key} in config.json): `specjax train {method}` makes a model that does"
        )
    return mask
