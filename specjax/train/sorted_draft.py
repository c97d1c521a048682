"""The task of S2D's draft model: the first layers of a model, whose exits all learn the text (SoFT, arXiv:2407.01955)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from specjax import models
from specjax.draft.s2d.exits import usual_exits
from specjax.draft.s2d.folder import EXITS, named_exits
from specjax.draft.s2d.objective import TrainS2D
from specjax.sharding.distributed import is_first
from specjax.train.language_model import begun
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, fields_of, refuse


@dataclasses.dataclass(frozen=True)
class Asked:
    """Fields of the line.

    Attributes:
      exits: ascending layer counts; the model is cut after the last. Empty: those that the folder of `--draft` names, or
        half of its layers, three quarters and all.
    """

    exits: tuple[int, ...] = ()


def s2d_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of the first layers of `--draft`, of a new model of `--draft-config`, or without both of the target.

    Raises:
      ValueError: on options or models that do not suit.
    """
    foreign = ("reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, "s2d, which learns the text's own tokens")
    (fields,) = fields_of(options.drafter, Asked)
    own = options.draft is None and options.draft_config is None
    if options.draft is not None and options.draft_config is not None:
        raise ValueError(
            "s2d trains one model: give --draft or --draft-config, or leave both out to begin with the target"
        )
    if target.masked is not None:
        raise ValueError(f"s2d trains autoregressive models, and {target.name} is {target.kind}")
    if own and not fields.get("exits"):
        raise ValueError(
            f"s2d begins with the first of {target.name}'s {target.lm.num_layers} layers: say which with s2d:exits=6 9 12, "
            "or give --draft"
        )
    model = begun("s2d", target, options)
    if not isinstance(model.lm, models.LlamaLM):
        raise ValueError(f"s2d trains models of this library's parts, and {model.name} is a {type(model.lm).__name__}")
    named = {} if options.draft_config is not None or own else named_exits(model)
    exits = fields.get("exits") or named.get("exits") or usual_exits(model.lm.num_layers)
    if list(exits) != sorted({*exits}) or exits[0] < 1 or exits[-1] > model.lm.num_layers:
        raise ValueError(
            f"s2d: exits must ascend from 1 to at most the {model.lm.num_layers} layers of {model.name}, got {exits}"
        )
    model = first_layers(model, exits[-1])
    check_length(options, model.lm)
    lm, tokenizer, eos_ids = model.lm, target.tokenizer, target.eos_ids

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(folder, lm, params, options.save_dtype, tokenizer, eos_ids, fields={EXITS: list(exits)})

    return Task(TrainS2D(lm, exits), model.params, None, save)


def first_layers(model: Any, count: int) -> Any:
    """A model of the first so many layers of another; the model itself if it has no more.

    Raises:
      ValueError: if they are no model of their own.
    """
    if count >= model.lm.num_layers:
        return model
    lm = dataclasses.replace(model.lm, config=model.lm.config.first(count))
    params = {**model.params, "layers": {i: model.params["layers"][i] for i in range(count)}}
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
    if shapes(lm.abstract()) != shapes(params):
        raise ValueError(f"s2d: parts of {model.name} are made for all of its layers: exits must end with all of them")
    return dataclasses.replace(model, lm=lm, params=params)
