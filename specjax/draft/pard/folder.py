"""The mask of a PARD model on disk, as AMD writes it: a causal model's folder, whose `config.json` names the mask."""

from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import is_id
from specjax.models.json_file import read_json

KEY = "pard_token"


def named_mask(draft: Any) -> int | None:
    """The id of the mask that a loaded draft model's folder names; None if it names none.

    A model of PARD-2 is read like any other: it was also trained without the target's features.

    Raises:
      ModelError: if it is no token of the model.
    """
    file = None if draft.path is None else draft.path / "config.json"
    config = read_json(file) if file is not None and file.is_file() else {}
    mask = config.get(KEY)
    if mask is not None and (not is_id(mask) or mask >= draft.lm.vocab_size):
        raise ModelError(f"{file}: {KEY} is {mask!r}, and the table of embeddings has {draft.lm.vocab_size} rows")
    return mask


def read_mask(draft: Any) -> int:
    """The same of a folder that must name one.

    Raises:
      ModelError: see `named_mask`; and if it names none.
    """
    mask = named_mask(draft)
    if mask is None:
        raise ModelError(
            f"{draft.name!r} names no mask token ({KEY} in config.json): `specjax train pard` makes a PARD model of it"
        )
    return mask


def mask_fields(mask: int) -> dict[str, Any]:
    """The fields of `config.json` that name a mask, as AMD writes them."""
    return {KEY: mask, "spd_type": "pard"}
