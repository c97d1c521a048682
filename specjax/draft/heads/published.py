"""Published heads: which drafter one is for, and how it is read as that drafter's fields and parameters.

Each layout is described in the drafter's own folder (`published.py`); tables here follow from the exports of
`specjax.draft`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.about import abouts, exported
from specjax.draft.base import Trained
from specjax.draft.heads.files import STEMS, config_file, read_tensors
from specjax.draft.heads.layout import Layout, Reader, Write
from specjax.models.errors import ModelError
from specjax.models.fields import an_object
from specjax.models.json_file import read_json

_OTHER_LAYERS = {
    "moe": "its layer has experts", "gemma": "its layers are Gemma's", "deepseek": "its attention is latent",
    "gptoss": "its layer has experts", "mla": "its attention is latent",
}  # fmt: skip
"""Words in the `architectures` of heads whose layers are not Llama's."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A published head as one of our drafters.

    Attributes:
      fields: of the drafter.
      params: its parameters.
      format: the layout's name.
      notes: what a user should know about how the file was read, one sentence each.
    """

    fields: dict[str, Any]
    params: Any
    format: str
    notes: tuple[str, ...] = ()


def layouts() -> dict[str, Layout]:
    """The layouts of all drafters that are exported, by the names that their folders have."""
    from specjax import draft

    found = {abouts(kind)[0].name: kind.layout() for kind in exported(Trained, draft)}
    return {name: layout for name, layout in found.items() if layout is not None}


def stems_of(*of: Layout | None) -> tuple[str, ...]:
    """Names of files with the weights of such heads."""
    return (*STEMS, *(stem for layout in of if layout is not None for stem in (*layout.stems, *layout.together)))


def drafter_of(folder: Path) -> str:
    """Which drafter a head's folder is for, by its `config.json` or, if that says nothing, by the names of its tensors.

    Raises:
      ModelError: if neither says it.
    """
    config, known = read_json(config_file(folder)), layouts()
    if "drafter" in config:
        return str(config["drafter"])
    sure = {name: layout.said(config) for name, layout in known.items()}
    if likeliest := max(sure.values()):
        return next(name for name, how in sure.items() if how == likeliest)
    tensors = read_tensors(folder, stems_of(*known.values()))
    held = next((name for name, layout in known.items() if layout.held(tensors)), None)
    if held is None:
        raise ModelError(
            f"{folder / 'config.json'} does not say which drafter it is for: give a line, such as eagle3:model=FOLDER"
        )
    return held


def writer(form: str, name: str) -> Write:
    """The writer of heads for the drafter `name` in a format, see `Layout.formats`.

    Raises:
      ModelError: if there is no such format, or not for these heads.
    """
    known = layouts()
    formats: dict[str, list[str]] = {}
    for drafter, layout in known.items():
        for own in layout.formats:
            formats.setdefault(own, []).append(drafter)
    if form not in formats:
        raise ModelError(f"unknown format {form!r} of a head; choose {', '.join(formats)}")
    if name not in formats[form]:
        whose = ", ".join(formats[form])
        raise ModelError(f"a head for {name} cannot be written as {form}: that is a format of {whose} heads")
    return known[name].formats[form]


def check_architecture(file: Path, config: Mapping[str, Any], drafter: str, layout: Layout) -> None:
    """Raises ModelError for the `architectures` of another drafter's heads, or of layers that are not Llama's.

    A head's class says nothing more: `LlamaForCausalLMEagle3`, `Eagle3LlamaForCausalLM` and `Eagle3Speculator` are one
    module.
    """
    ours = {name: other.what for name, other in layouts().items() if other.what}
    others = {**ours, **_OTHER_LAYERS}
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        found = (word for word in others if word in str(name).lower() and word not in (drafter, *layout.beside))
        if other := next(found, None):
            raise ModelError(f"{file}: architectures has {name!r}, a head of another kind ({others[other]})")


def _fields_of(target: Any) -> set[str]:
    """The names in a target's own `config.json`, if it has one."""
    file = None if target.path is None else target.path / "config.json"
    said = {} if file is None or not file.is_file() else read_json(file)
    return {*said, *an_object("text_config", said.get("text_config"))}


def read_published(
    folder: Path, name: str, layout: Layout | None, config: dict[str, Any], target: Any,
    chosen: dict[str, Any] | None = None,
) -> Published:  # fmt: skip
    """A published head.

    Args:
      folder: with `config.json` and the weights, in safetensors or, if torch is installed, in its own format.
      name: the drafter's registry name.
      layout: of its class.
      config: the content of `config.json`.
      target: from `specjax.models.load` or `abstract`.
      chosen: fields of the drafter that the user set; `taps` take precedence over the file.

    Raises:
      ModelError: for a missing, misshapen or unknown tensor or flag, and for a head of another width or vocabulary.
    """
    if layout is None:
        raise ModelError(
            f"{folder / 'config.json'} does not say which drafter it is for, and {name} has no published layout"
        )
    check_architecture(config_file(folder), config, name, layout)
    keep = None if layout.keep is None else layout.keep(target)
    reader = Reader(folder, chosen, keep, _fields_of(target), stems_of(layout), layout.together)
    try:
        fields, params = layout.read(reader, config, target)
    except ModelError:
        raise
    except (TypeError, AttributeError, ValueError, KeyError, ArithmeticError) as error:
        raise ModelError(f"{reader.file} has a field of the wrong kind: {error}") from error
    reader.finish()
    return Published(fields, params, reader.format or name, tuple(reader.notes))
