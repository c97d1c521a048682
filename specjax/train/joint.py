"""The task of `joint`: a head and low-rank changes of its target, which are written as a LoRA adapter."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.assembly.line import read_line
from specjax.models import LlamaLM, adapter_writing, resolve_dtype
from specjax.models.loading import naming_of
from specjax.objectives.joint import Joint
from specjax.sharding.distributed import is_first
from specjax.train.methods import HeadTask
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_plain, fields_of, refuse, with_preset

ADAPTER = "adapter"
"""The folder of the adapter, in that of the head."""


@dataclasses.dataclass(frozen=True)
class Named:
    """Further fields of the line.

    Attributes:
      head: the head's line, as `train` takes it.
    """

    head: str = "medusa"


def joint_task(heads: Mapping[str, HeadTask], target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a head, which `heads` makes, and its target.

    Raises:
      ValueError: on options or a target that do not suit.
    """
    refuse(options, ("features",), "joint, which changes the target and so its features: give --data")
    if target.masked is not None:
        raise ValueError(f"joint trains an autoregressive model with a head, and {target.name} is {target.kind}")
    check_plain("joint", target)
    if options.adapter:
        raise ValueError(
            "joint writes an adapter for the target as it is, so --adapter is not for it: write the merged model with "
            "`specjax convert --adapter` and train that"
        )
    if not isinstance(target.lm, LlamaLM):
        raise ValueError(f"joint changes models of this library's parts, and {target.name} is another one")
    own, named = fields_of(options.drafter, Joint, Named)
    chosen = with_preset("joint", Joint, {**own, **named})
    line = chosen.pop("head", Named.head)
    name = read_line(line, "head").name
    if name not in heads:
        raise ValueError(f"joint trains a head over the target, and {name!r} is none; choose {', '.join(heads)}")
    Joint(None, **chosen)  # checks the fields before the head's parameters are made
    task = heads[name](target, dataclasses.replace(options, drafter=line), read)
    made = Joint(task.objective, **chosen)
    adapter = made.fresh(jax.random.key(options.seed), target.params)
    stored = adapter_writing.stored_changes(adapter, target.params, *naming_of(target))

    def save(folder: Path, params: Any) -> None:
        if is_first():
            dtype = resolve_dtype(options.save_dtype)
            adapter_writing.write(
                folder / ADAPTER, params["adapter"], stored, made.rank, made.alpha, target.name, dtype
            )
        task.save(folder, params["head"])  # changes leave alone what the fingerprint of a target is made of

    return Task(made, {"head": task.params, "adapter": adapter}, target.params, save)
