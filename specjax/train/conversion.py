"""The task that makes a diffusion model of an autoregressive one (`specjax train a2d`)."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.models import Masked
from specjax.models.masked import to_hf
from specjax.models.plain_tokenizer import PlainTokenizer
from specjax.objectives.masked import Conversion
from specjax.sharding.distributed import is_first
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, check_plain, fields_of, refuse

MASK = "<|mask|>"
"""The token that a tokenizer without a mask gets."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a line of `a2d` says of the model, besides its loss.

    Attributes:
      shift: whether the output at position i - 1 is for position i, as the autoregressive model's was.
    """

    shift: bool = False


def a2d_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of all parameters of an autoregressive target, whose attention goes in both directions from now on.

    A tokenizer without a mask token gets one, and the model a row for it, the mean of all others.

    Raises:
      ValueError: on options that are not for it, a diffusion model, or a model that no diffusion layout can express.
    """
    refuse(options, ("draft", "draft_config", "reference", "loss", "draft_vocabulary", "start", "features"), "a2d")
    if target.masked is not None:
        raise ValueError(
            f"a2d converts autoregressive models, and {target.name} is a diffusion model: `specjax train diffusion` "
            "trains it"
        )
    if not isinstance(target.lm, models.LlamaLM):
        raise ValueError(
            f"a2d converts models of this library's parts, and {target.name} is a {type(target.lm).__name__}"
        )
    if target.tokenizer is None:
        raise ValueError(f"a2d needs a token for masks, and {target.name} has no tokenizer: put one into its folder")
    check_plain("a2d", target)
    of_loss, of_model = fields_of(options.drafter, Conversion, Layout)
    model, mask_id = with_mask(target)
    shift = of_model.get("shift", False)
    of_loss.setdefault("align", "text" if shift else "prompt_end")
    made = Conversion(model.lm, mask_id, shift, **of_loss)
    if shift and made.align != "text":
        raise ValueError("a2d: blocks of a model with shifted logits count from a text's beginning: leave align out")
    masked = Masked(mask_id, shift, made.block or 0, align=(made.align or "text") if made.block else "text")
    to_hf(model.lm.config, masked)
    check_length(options, model.lm)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)  # small updates must not be lost
    lm, tokenizer, eos_ids, generation = model.lm, model.tokenizer, model.eos_ids, model.generation

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(folder, lm, params, options.save_dtype, tokenizer, eos_ids, masked, generation=generation)

    return Task(made, params, None, save)


def with_mask(model: Any) -> tuple[Any, int]:
    """A model whose tokenizer has a mask token, and that token's id."""
    if model.tokenizer.mask_token_id is not None:
        return model, int(model.tokenizer.mask_token_id)
    tokenizer = model.tokenizer.whole() if isinstance(model.tokenizer, PlainTokenizer) else model.tokenizer
    tokenizer = copy.deepcopy(tokenizer)  # the model's own stays as it is
    tokenizer.add_special_tokens({"mask_token": MASK})
    model, mask_id = dataclasses.replace(model, tokenizer=tokenizer), int(tokenizer.mask_token_id)
    more = mask_id + 1 - model.lm.vocab_size
    if more <= 0:  # a table may have rows to spare
        return model, mask_id
    config = model.lm.config
    config = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, vocab_size=mask_id + 1))
    grown = lambda x, axis: jnp.concatenate(
        [x, jnp.repeat(x.mean(axis=axis, keepdims=True), more, axis=axis)], axis=axis
    )
    params = {**model.params, "embed": {"embedding": grown(model.params["embed"]["embedding"], 0)}}
    if not config.head.tied:
        params["head"] = {name: grown(x, x.ndim - 1) for name, x in model.params["head"].items()}
    return dataclasses.replace(model, lm=dataclasses.replace(model.lm, config=config), params=params), mask_id
