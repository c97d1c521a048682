"""The mask of a block drafter on disk: the folder of a model with an encoder, whose `config.json` names the mask."""

from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import is_id
from specjax.models.json_file import read_json

KEY = "mask_token_id"


def named_mask(draft: Any) -> int | None:
    """The id of the mask that a loaded model's folder names; None if it names none.

    Raises:
      ModelError: if it is no token of the model.
    """
    file = None if draft.path is None else draft.path / "config.json"
    mask = read_json(file).get(KEY) if file is not None and file.is_file() else None
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
            f"{draft.name!r} names no mask token ({KEY} in config.json): `specjax train gad` makes a block drafter"
        )
    return mask


def mask_fields(mask: int) -> dict[str, Any]:
    """The field of `config.json` that names a mask."""
    return {KEY: mask}
