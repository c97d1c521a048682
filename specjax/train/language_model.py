"""The task of a language model that learns text by itself: a draft model's, or the target's own parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.assembly.models_beside import check_vocabulary, draft_model, padded
from specjax.draft import ModelDrafter
from specjax.models.block_ffn import blocks_of
from specjax.objectives.next_token import NextToken
from specjax.objectives.sparsity import Sparsity
from specjax.sharding.distributed import is_first
from specjax.train.new_draft import check_all_tokens, new_draft
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, check_plain, fields_of, refuse


def lm_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of the model of `--draft`, of a new one of `--draft-config`, or without both of the target itself.

    For a draft model, the target gives the tokenizer, and with `--prompts` the texts.

    Raises:
      ValueError: on options or models that do not suit.
    """
    foreign = ("reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, "lm, which learns the text's own tokens")
    of_loss, own = fields_of(options.drafter, NextToken, Sparsity)
    sparsity = Sparsity(**own) if own else None
    if options.draft is not None and options.draft_config is not None:
        raise ValueError("lm trains one model: give --draft or --draft-config, or leave both out to train the target")
    if target.masked is not None:
        raise ValueError(
            f"lm trains autoregressive models, and {target.name} is {target.kind}: `specjax train diffusion` trains it"
        )
    NextToken(target.lm, **of_loss)  # checks the fields
    model = begun("lm", target, options)
    if not isinstance(model.lm, models.LlamaLM):
        raise ValueError(f"lm trains models of this library's parts, and {model.name} is a {type(model.lm).__name__}")
    check_length(options, model.lm)
    if sparsity is not None:
        blocks_of(model.lm.config)
    objective = NextToken(model.lm, sparsity, **of_loss)
    lm, generation, dual = model.lm, model.generation, model.dual
    tokenizer, eos_ids = target.tokenizer, target.eos_ids  # of the target, nothing else outlives this function

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(folder, lm, params, options.save_dtype, tokenizer, eos_ids, dual, generation=generation)

    return Task(objective, model.params, None, save)


def begun(name: str, target: Any, options: TrainOptions) -> Any:
    """What a method of this `name` begins with, in float32, since small updates would be lost in the target's own type."""
    if options.draft is not None:
        check_all_tokens(options.draft)
        draft = draft_model(options.draft, dataclasses.replace(target, dtype="float32"), None)
        ModelDrafter(padded(draft, target)).bind(target.lm)
        check_vocabulary(draft, target)
        return draft
    if options.draft_config is not None:
        lm = new_draft(options.draft_config, target)
        params = lm.init(jax.random.key(options.seed))
        return dataclasses.replace(target, lm=lm, params=params, name=options.draft_config, generation={})
    check_plain(name, target, ", or train a draft model (--draft, --draft-config)")
    return dataclasses.replace(target, params=jax.tree.map(lambda x: x.astype(jnp.float32), target.params))
