"""The mask of a PARD draft model on disk, in the layout of AMD's models: a causal model's folder, whose `config.json` names it."""

from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import is_id
from specjax.models.json_file import read_json

KEY = "pard_token"


def read_mask(draft: Any) -> int:
    """The id of the mask that a loaded draft model's folder names.

    Raises:
      ModelError: if it names none, or the model is one of PARD-2.
    """
    file = None if draft.path is None else draft.path / "config.json"
    config = read_json(file) if file is not None and file.is_file() else {}
    if config.get("pard2") or config.get("spd_type") == "pard2":
        raise ModelError(
            f"{draft.name!r} is a draft model of PARD-2, which reads the target's features: those are not served"
        )
    mask = config.get(KEY)
    if mask is None:
        raise ModelError(
            f"{draft.name!r} names no mask token ({KEY} in config.json): `specjax train pard` makes a PARD model of it"
        )
    if not is_id(mask) or mask >= draft.lm.vocab_size:
        raise ModelError(f"{file}: {KEY} is {mask!r}, and the table of embeddings has {draft.lm.vocab_size} rows")
    return mask


def mask_fields(mask: int) -> dict[str, Any]:
    """The fields of `config.json` that name a mask, as AMD writes them."""
    return {KEY: mask, "spd_type": "pard"}
