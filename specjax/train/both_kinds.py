"""The task of a model of both kinds: an autoregressive target learns to fill in blocks too (Nemotron-Labs-Diffusion)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.draft.self_diffusion.objective import TrainSelfDiffusion
from specjax.models.masked import to_hf
from specjax.sharding.distributed import is_first
from specjax.train.options import TrainOptions
from specjax.train.pard import chosen_mask
from specjax.train.task import Read, Task, check_length, check_plain, fields_of, refuse

NAME = "self_diffusion"


def both_kinds_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a target's own parameters.

    Raises:
      ValueError: on options or a target that do not suit.
    """
    foreign = ("draft", "draft_config", "reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, f"{NAME}, which trains the target on its text's own tokens")
    if target.masked is not None:
        raise ValueError(f"{NAME} begins with an autoregressive model, and {target.name} is a diffusion model")
    if not isinstance(target.lm, models.LlamaLM):
        raise ValueError(
            f"{NAME} trains models of this library's parts, and {target.name} is a {type(target.lm).__name__}"
        )
    check_plain(NAME, target)
    (fields,) = fields_of(options.drafter, TrainSelfDiffusion)
    dual = target.dual
    mask = chosen_mask(target, fields.pop("mask", -1), None if dual is None else dual.mask_id, NAME)
    if mask >= target.lm.vocab_size:
        raise ValueError(
            f"{NAME}: {target.name} has no spare token for masks: name one that no text has, as {NAME}:mask=7"
        )
    fields = ({} if dual is None else {"block": dual.block}) | fields
    check_length(options, target.lm)
    objective = TrainSelfDiffusion(target.lm, mask=mask, **fields)
    how = models.Masked(mask, shift=False, block=objective.block, align="prompt_end", causal_context=True)
    to_hf(target.lm.config, how)  # a model that has no layout is refused before it is trained
    lm, tokenizer, eos_ids, generation = target.lm, target.tokenizer, target.eos_ids, target.generation

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(
                folder, lm, params, options.save_dtype, tokenizer, eos_ids, diffusion=how, generation=generation
            )

    params = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)  # small updates would be lost otherwise
    return Task(objective, params, None, save)
