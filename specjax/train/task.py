"""The task of a training run, from a line and the command's options."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.assembly.line import read_line
from specjax.assembly.registry import Entry, parse, plain_fields
from specjax.lm import encodes
from specjax.objectives.base import Lines, Objective
from specjax.objectives.losses import LOSSES, Loss
from specjax.train.options import TrainOptions, length_of

if TYPE_CHECKING:
    from specjax.train.data import Rows


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
      objective: the loss.
      params: the initial parameters.
      frozen: the `target_params` of the objective.
      save: writes trained parameters, numpy arrays, to a folder. All processes call it, but only the first one writes.
    """

    objective: Objective
    params: Any
    frozen: Any
    save: Callable[[Path, Any], None]


Read = Callable[[], "Rows"]
"""A function that reads the data, for tasks that depend on it."""
Make = Callable[[Any, TrainOptions, Read], Task]
"""A function that makes a task from a loaded target, the command's options and the data."""


@dataclasses.dataclass(frozen=True)
class Making:
    """How a method is trained.

    Attributes:
      objective: the class of its loss.
      make: makes its task.
    """

    objective: type[Objective]
    make: Make


def make_loss(line: str) -> Loss:
    """A loss from its line of text, such as `jsd:beta=0.1`.

    Raises:
      ValueError: on an unknown name or field; lists the known ones.
    """
    return parse("loss", {name: Entry(kind, plain_fields(kind)) for name, kind in LOSSES.items()}, line)


def fields_of(line: str, *kinds: type) -> tuple[dict[str, Any], ...]:
    """The fields that a line sets, separately for each of the dataclasses."""
    own = [_settable(kind) for kind in kinds]
    known = {name: value for fields in own for name, value in fields.items()}
    chosen = parse("drafter", {read_line(line).name: Entry(dict, known)}, line)
    return tuple({name: value for name, value in chosen.items() if name in fields} for fields in own)


def _settable(kind: type) -> dict[str, Any]:
    """The fields that a line may set. Lists of an objective are excluded: they follow from the target and other
    options."""
    fields = plain_fields(kind)
    if not issubclass(kind, Objective):
        return fields
    own = {name: value for name, value in fields.items() if value != ()}
    return own | {"preset": ""} if kind.presets else own


def with_preset(name: str, kind: type[Objective], fields: dict[str, Any]) -> dict[str, Any]:
    """A line's fields of an objective, on top of the preset that it names.

    Raises:
      ValueError: on an unknown preset.
    """
    preset = fields.pop("preset", "")
    if preset and preset not in kind.presets:
        raise ValueError(f"the training of {name} has the presets {', '.join(kind.presets)}, not {preset!r}")
    return {**kind.presets.get(preset, {}), **fields}


def divergence_of(options: TrainOptions) -> dict[str, Any]:
    """The field of an objective that --loss sets; empty without it."""
    return {} if options.loss is None else {"divergence": make_loss(options.loss)}


def check_length(options: TrainOptions, lm: Any, besides: int = 0) -> None:
    """Raises ValueError if rows, and so many slots `besides`, are longer than the draft model's positions."""
    longest = lm.config.max_position_embeddings
    if length_of(options) + besides > longest:
        more = f" and {besides} for what is read beside a text are" if besides else " is"
        raise ValueError(f"--length {length_of(options)}{more} more than the draft's {longest} positions")


def refuse(options: TrainOptions, names: Iterable[str], why: str) -> None:
    """Raises ValueError on the first of these options that is given; `why` names the method, and may say more."""
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not for {why}")


def check_plain(name: str, target: Any, otherwise: str = "") -> None:
    """Raises ValueError if a method would train weights that are packed; `otherwise` is further advice."""
    if target.weights is not None:
        raise ValueError(
            f"{name} trains {target.name}'s own weights, and they are {target.weights}: leave out --weights{otherwise}"
        )


def check_encoder(target: Any, lines: Lines, name: str, otherwise: str = "") -> None:
    """Raises ValueError if only one of a target and a method's data, of these lines, has sources; `otherwise` is advice."""
    if encodes(target.lm) and lines != "sourced":
        raise ValueError(
            f"rows of training data have no sources for the encoder of {target.name}: {otherwise}choose a target "
            "without one"
        )
    if lines == "sourced" and not encodes(target.lm):
        raise ValueError(
            f"{name} drafts for a target with an encoder, and {target.name} has none: choose another target"
        )


def check_masked(name: str, target: Any, options: TrainOptions, blocks: bool = False) -> None:
    """Raises ValueError on options or a target that do not suit the training of a diffusion model.

    `blocks`: whether models with blocks are trained, if logits are not shifted.
    """
    refuse(options, ("draft", "draft_config", "reference", "loss", "draft_vocabulary", "start"), name)
    if target.masked is None:
        raise ValueError(f"{name} trains a diffusion model, and {target.name} is an autoregressive one")
    if target.any_subset:
        raise ValueError(f"{name} trains a diffusion model, and {target.name} is {target.kind}: train any_subset")
    own = target.masked
    if own.block and not blocks:
        raise ValueError(f"{name} trains models that see the whole canvas, and {target.name} does not")
    if own.block and (own.shift or own.reordered):
        raise ValueError(
            f"{name} trains models with blocks that have no shift and no window, and {target.name} has others"
        )
