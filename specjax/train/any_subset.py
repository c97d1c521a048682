"""The task of an any-subset model: a folder of XLNet, or a new one of `--draft-config`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.models import Gaps, xlnet
from specjax.objectives.any_subset import AnySubsetLoss
from specjax.sharding.distributed import is_first
from specjax.train.new_draft import given_config
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_plain, fields_of, refuse


def any_subset_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of the target, an any-subset model, or of a new one with the target's tokenizer (`--draft-config`).

    Raises:
      ValueError: on options or models that do not suit.
    """
    foreign = ("draft", "reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, "any_subset, which learns the text's own tokens")
    (fields,) = fields_of(options.drafter, AnySubsetLoss)
    if options.draft_config is None:
        if not target.any_subset:
            raise ValueError(
                f"any_subset trains an any-subset model, and {target.name} is {target.kind}: give a folder of XLNet as "
                "--target, or a new model's --draft-config"
            )
        check_plain("any_subset", target)
        lm, gaps, params = target.lm, target.masked, target.params
    else:
        lm, gaps = new_model(options.draft_config, target)
        params = lm.init(jax.random.key(options.seed))
    tokenizer, eos_ids, generation = target.tokenizer, target.eos_ids, target.generation
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)  # small updates must not be lost

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(folder, lm, params, options.save_dtype, tokenizer, eos_ids, gaps, generation=generation)

    return Task(AnySubsetLoss(lm, **fields), params, None, save)


def new_model(file: str, target: Any) -> tuple[xlnet.XlnetLM, Gaps]:
    """The model of a `config.json`, which has the target's vocabulary, and how its gaps are written.

    Raises:
      ValueError: on a file that is no such config.
    """
    given = given_config(file)
    size = target.lm.vocab_size
    if given.get("vocab_size", size) != size:
        raise ValueError(f"--draft-config {file!r}: vocab_size must be the {size} of {target.name}: leave it out")
    raw = {"model_type": "xlnet", "vocab_size": size} | given
    mask = getattr(target.masked, "mask_id", -1)
    own_mask = lambda: getattr(target.tokenizer, "mask_token_id", None) if mask < 0 else mask
    return xlnet.XlnetLM(xlnet.config_of(raw)), xlnet.gaps_of(raw, own_mask)
