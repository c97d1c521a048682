"""Published heads: the file layouts of Medusa, Hydra, EAGLE-1/2, EAGLE-3, P-EAGLE, DFlash, DSpark, Clover-2, MTP, PPD,
Kangaroo and Gemma 4's assistants, read as fields and parameters of our drafters."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.draft.heads.layout import Reader, check_architecture
from specjax.draft.heads.published_block import dflash, dspark, peagle
from specjax.draft.heads.published_clover import clover2
from specjax.draft.heads.published_eagle import eagle1, eagle3
from specjax.draft.heads.published_gemma import gemma4_assistant
from specjax.draft.heads.published_kangaroo import kangaroo
from specjax.draft.heads.published_medusa import hydra, medusa
from specjax.draft.heads.published_mtp import mtp, own_tensors
from specjax.draft.heads.published_ppd import ppd
from specjax.models.errors import ModelError
from specjax.models.fields import an_object
from specjax.models.json_file import read_json

Layout = Callable[[Reader, dict[str, Any], Any], tuple[dict[str, Any], Any]]
"""From a head's tensors, its `config.json` and its target to fields and parameters of the drafter."""

_LAYOUTS: dict[str, Layout] = {
    "medusa": medusa,
    "hydra": hydra,
    "eagle1": eagle1,
    "eagle3": eagle3,
    "ppd": ppd,
    "kangaroo": kangaroo,
    "clover2": clover2,
    "mtp": mtp,
    "peagle": peagle,
    "dflash": dflash,
    "dspark": dspark,
    "gemma4_assistant": gemma4_assistant,
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A published head as one of our drafters.

    Attributes:
      fields: of the drafter.
      params: its parameters.
      format: whose layout it has.
      notes: what a user should know of how the file was read, a sentence each.
    """

    fields: dict[str, Any]
    params: Any
    format: str
    notes: tuple[str, ...] = ()


def _fields_of(target: Any) -> set[str]:
    """The names in a target's own `config.json`, where it has one."""
    file = None if target.path is None else target.path / "config.json"
    said = {} if file is None or not file.is_file() else read_json(file)
    return {*said, *an_object("text_config", said.get("text_config"))}


def read_published(
    folder: Path, name: str, config: dict[str, Any], target: Any, chosen: dict[str, Any] | None = None
) -> Published:
    """A published head.

    Args:
      folder: with `config.json` and the weights, in safetensors or, where torch is installed, in its own format.
      name: the drafter's registry name.
      config: the content of `config.json`.
      target: what `specjax.models.load` returned, or `abstract`.
      chosen: fields of the drafter that the user set; `taps` go before what the file says.

    Raises:
      ModelError: on a missing, misshapen or unknown tensor or flag, and on a head of another width or vocabulary.
    """
    if name not in _LAYOUTS:
        raise ModelError(
            f"{folder / 'config.json'} does not say which drafter it is for, and {name} has no published layout"
        )
    reader = Reader(folder, chosen, own_tensors(target) if name == "mtp" else None, _fields_of(target))
    check_architecture(reader, config, name)
    try:
        fields, params = _LAYOUTS[name](reader, config, target)
    except ModelError:
        raise
    except (TypeError, AttributeError, ValueError, KeyError, ArithmeticError) as error:
        raise ModelError(f"{reader.file} has a field of the wrong kind: {error}") from error
    reader.finish()
    return Published(fields, params, reader.format or name, tuple(reader.notes))
