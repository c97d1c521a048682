"""The task of lexical unit decoding: a target that learns to say several tokens at once, at pads (arXiv:2405.15208)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.draft.lud.objective import TrainLud
from specjax.draft.masks_on_disk import LUD, named_mask
from specjax.sharding.distributed import is_first
from specjax.train.options import TrainOptions
from specjax.train.pard import chosen_mask
from specjax.train.task import Read, Task, check_length, check_plain, divergence_of, fields_of, refuse


def lud_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a target's own parameters; the target as it was labels the text.

    Raises:
      ValueError: on options or a target that do not suit.
    """
    refuse(options, ("draft", "draft_config", "reference", "draft_vocabulary", "start"), "lud, which trains the target")
    if target.masked is not None:
        raise ValueError(f"lud trains autoregressive models, and {target.name} is {target.kind}")
    if not isinstance(target.lm, models.LlamaLM):
        raise ValueError(
            f"lud trains models of this library's parts, and {target.name} is a {type(target.lm).__name__}"
        )
    check_plain("lud", target)
    (fields,) = fields_of(options.drafter, TrainLud)
    if (asked := fields.pop("mask", -1)) >= target.lm.vocab_size:
        raise ValueError(f"lud: mask {asked} is outside the {target.lm.vocab_size} tokens of {target.name!r}")
    pad = chosen_mask(target, asked, named_mask(target, LUD), "lud")
    if pad == target.lm.vocab_size:
        raise ValueError(f"lud: {target.name} has no spare token for pads: name one that no text has, as lud:mask=7")
    check_length(options, target.lm)
    objective = TrainLud(target.lm, target.lm, mask=pad, **fields, **divergence_of(options))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)  # small updates would be lost otherwise

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(
                folder, target.lm, params, options.save_dtype, target.tokenizer, target.eos_ids, target.dual,
                generation=target.generation, fields={LUD: pad},
            )  # fmt: skip

    return Task(objective, params, target.params, save)
