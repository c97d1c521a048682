"""The task of GAD: a model with an encoder that learns to draft blocks of masks (arXiv:2203.16487)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.assembly.models_beside import check_vocabulary, draft_model, fitting
from specjax.draft.gad.objective import TrainGad
from specjax.draft.masks_on_disk import GAD, named_mask
from specjax.lm import check_both_encode
from specjax.sharding.distributed import is_first
from specjax.train.options import TrainOptions
from specjax.train.pard import chosen_mask, with_row
from specjax.train.task import Read, Task, check_length, check_plain, fields_of, refuse


def gad_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a block drafter: a model like the target, or one that goes on from `--draft`.

    As published, a new one begins with the target's encoder and tables, and its decoder's layers with random numbers.
    """
    foreign = ("draft_config", "reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, "gad, which learns the target's own texts of prompts")
    if options.draft is None:
        check_plain("gad", target, ", or start from --draft")
    if not isinstance(target.lm, models.LlamaLM):
        raise ValueError(
            f"gad trains models of this library's parts, and {target.name} is a {type(target.lm).__name__}"
        )
    if target.lm.source_features:
        raise ValueError(f"gad is trained on prompts of tokens, and {target.name} reads features")
    (fields,) = fields_of(options.drafter, TrainGad)
    draft = begun(target, options)
    asked = fields.pop("mask", -1)
    mask = chosen_mask(draft, asked, named_mask(draft, GAD) if options.draft else None, "gad")
    if mask == draft.lm.vocab_size:
        draft = with_row(draft)
    lm = fitting(draft, target, mask)
    check_vocabulary(draft, target, besides=mask, what="block drafter")
    objective = TrainGad(target.lm, lm, starts=tuple(target.starts), mask=mask, **fields)
    check_length(options, draft.lm, len(objective.starts) + objective.block)

    def save(folder: Path, params: Any) -> None:
        if is_first():
            models.save(
                folder, draft.lm, params, options.save_dtype, target.tokenizer, target.eos_ids,
                generation=target.generation, fields={GAD: mask},
            )  # fmt: skip

    return Task(objective, draft.params, None, save)


def begun(target: Any, options: TrainOptions) -> Any:
    """The model before training, in float32, since small updates would be lost in the target's own type."""
    if options.draft is not None:
        draft = draft_model(
            options.draft, dataclasses.replace(target, dtype="float32"), None, "a model with an encoder"
        )
        check_both_encode(draft.lm, target.lm, f"the block drafter {draft.name!r}")
        return draft
    own = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)
    layers = jax.jit(lambda key: target.lm.init(key)["layers"])(jax.random.key(options.seed))  # makes nothing else
    return dataclasses.replace(target, params={**own, "layers": layers})
