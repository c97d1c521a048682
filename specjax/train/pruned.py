"""The task of PAT: a narrower model of the same vocabulary, cut out of a larger one (arXiv:2408.14721)."""

from pathlib import Path
from typing import Any

import jax

from specjax import models
from specjax.models import hf_config
from specjax.objectives.pat import Pat
from specjax.sharding import distributed
from specjax.terminal import note
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, check_plain, fields_of, refuse


def pat_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a mask over the target's channels; the target itself does not change.

    Raises:
      ValueError: on options or a target that do not suit.
    """
    foreign = ("draft", "draft_config", "reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, "pat, which cuts a narrower model out of the target")
    if target.masked is not None:
        raise ValueError(f"pat cuts autoregressive models, and {target.name} is a diffusion model")
    if not isinstance(target.lm, models.LlamaLM):
        raise ValueError(f"pat cuts models of this library's parts, and {target.name} is a {type(target.lm).__name__}")
    check_plain("pat", target)
    check_length(options, target.lm)
    (fields,) = fields_of(options.drafter, Pat)
    objective = Pat(target.lm, **fields, updates=options.steps, learning_rate=options.learning_rate)
    hf_config.to_hf(objective.narrow.config)  # a model that no file can describe is an error before it is trained
    params = objective.init(jax.random.key(options.seed), target.params)
    tokenizer, eos_ids, generation, frozen = target.tokenizer, target.eos_ids, target.generation, target.params
    dual = target.dual

    def save(folder: Path, params: Any) -> None:
        lm, narrow = objective.cut(params, distributed.to_host(frozen))
        if distributed.is_first():
            models.save(folder, lm, narrow, options.save_dtype, tokenizer, eos_ids, dual, generation=generation)
            size, above = objective.lm.config.hidden_size, int((params["mask"] > 0).sum())
            note(f"{objective.kept} of {size} channels are kept; {above} have a mask above 0")

    return Task(objective, params, frozen, save)
