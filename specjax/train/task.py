"""The task of a training run, from a line and the command's options."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.assembly.line import read_line
from specjax.assembly.registry import Entry, parse, plain_fields
from specjax.objectives.base import Objective
from specjax.objectives.losses import LOSSES, Loss
from specjax.train.options import TrainOptions, length_of

if TYPE_CHECKING:
    from specjax.train.data import Rows


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train.

    Attributes:
      objective: the loss.
      params: where it starts.
      frozen: what the objective takes as `target_params`.
      save: writes trained parameters, numpy arrays, to a folder. All processes call it, and the first one writes.
    """

    objective: Objective
    params: Any
    frozen: Any
    save: Callable[[Path, Any], None]


Read = Callable[[], "Rows"]
"""Reads the data, where a task depends on it."""
Make = Callable[[Any, TrainOptions, Read], Task]
"""Makes a task from a loaded target, the command's options and the data."""


def make_loss(line: str) -> Loss:
    """A loss from its line of text, such as `jsd:beta=0.1`.

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    return parse("loss", {name: Entry(kind, plain_fields(kind)) for name, kind in LOSSES.items()}, line)


def fields_of(line: str, *kinds: type) -> tuple[dict[str, Any], ...]:
    """The fields that a line sets, for each of the dataclasses those that are its own."""
    own = [_settable(kind) for kind in kinds]
    known = {name: value for fields in own for name, value in fields.items()}
    chosen = parse("drafter", {read_line(line).name: Entry(dict, known)}, line)
    return tuple({name: value for name, value in chosen.items() if name in fields} for fields in own)


def _settable(kind: type) -> dict[str, Any]:
    """The fields that a line may set: of an objective no lists, which follow from the target and other options."""
    fields = plain_fields(kind)
    if not issubclass(kind, Objective):
        return fields
    own = {name: value for name, value in fields.items() if value != ()}
    return own | {"preset": ""} if kind.presets else own


def with_preset(name: str, kind: type[Objective], fields: dict[str, Any]) -> dict[str, Any]:
    """A line's fields of an objective, on top of those of the preset that it names.

    Raises:
      ValueError: on a preset that there is not.
    """
    preset = fields.pop("preset", "")
    if preset and preset not in kind.presets:
        raise ValueError(f"the training of {name} has the presets {', '.join(kind.presets)}, not {preset!r}")
    return {**kind.presets.get(preset, {}), **fields}


def divergence_of(options: TrainOptions) -> dict[str, Any]:
    """The field of an objective that --loss sets; none without it."""
    return {} if options.loss is None else {"divergence": make_loss(options.loss)}


def check_length(options: TrainOptions, lm: Any) -> None:
    """Raises ValueError where rows are longer than what the draft model was made for."""
    longest = lm.config.max_position_embeddings
    if length_of(options) > longest:
        raise ValueError(f"--length {length_of(options)} is more than the draft's {longest} positions")


def check_masked(name: str, target: Any, options: TrainOptions) -> None:
    """Raises ValueError on options or a target that the training of a diffusion model cannot use."""
    foreign = ("draft", "draft_config", "reference", "loss", "draft_vocabulary", "start")
    given = [option for option in foreign if getattr(options, option) is not None]
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} is not for {name}")
    if target.masked is None:
        raise ValueError(f"{name} trains a diffusion model, and {target.name} is an autoregressive one")
    if target.masked.block:
        raise ValueError(f"{name} trains models that see the whole canvas, and the blocks of {target.name} do not")
