"""The exits of a draft model on disk: its folder's `config.json` lists them, if it was trained with them."""

from typing import Any

from specjax.draft.masks_on_disk import config_of
from specjax.models.errors import ModelError

EXITS = "s2d_exits"
"""The key: ascending layer counts, the last of which is the whole model."""


def named_exits(draft: Any) -> dict[str, Any]:
    """The field `exits` that a loaded model's folder gives; nothing if it names no exits.

    Raises:
      ModelError: if they are no layer counts that ascend to all layers.
    """
    file, config = config_of(draft)
    exits = config.get(EXITS)
    if exits is None:
        return {}
    whole = isinstance(exits, list) and all(type(count) is int and count > 0 for count in exits)
    if not whole or exits != sorted({*exits}) or exits[-1:] != [draft.lm.num_layers]:
        raise ModelError(f"{file}: {EXITS} is {exits!r}, and must ascend to the model's {draft.lm.num_layers} layers")
    return {"exits": tuple(exits)}
