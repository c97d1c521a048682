"""The task of merged prompts: the inputs of merged tokens, for an unchanged model (arXiv:2411.18553)."""

from pathlib import Path
from typing import Any

import jax

from specjax.lm import check_mixtures
from specjax.models.model import resolve_dtype
from specjax.search.merged_prompts.embedder import save_network
from specjax.search.merged_prompts.merging import Merger
from specjax.search.merged_prompts.objective import TrainMergedPrompts
from specjax.sharding.distributed import is_first
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, fields_of, refuse

NAME = "merged_prompts"


def merged_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a network over the embeddings of merged tokens' parts.

    Raises:
      ValueError: on options or a target that do not suit.
    """
    foreign = ("draft", "draft_config", "reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, f"{NAME}, which learns the target's own distributions")
    if target.masked is not None or target.canvas:
        raise ValueError(f"{NAME} is for autoregressive models, and {target.name} is a diffusion model")
    check_mixtures(target.lm)
    check_length(options, target.lm)
    (fields,) = fields_of(options.drafter, TrainMergedPrompts)
    objective = TrainMergedPrompts(target.lm, **fields)
    begins, ends = Merger(target.tokenizer).edges(target.lm.vocab_size)
    frozen = {"lm": target.params, "begins": jax.device_put(begins), "ends": jax.device_put(ends)}

    def save(folder: Path, params: Any) -> None:
        if is_first():
            save_network(folder, params, resolve_dtype(options.save_dtype))

    return Task(objective, objective.init(jax.random.key(options.seed), frozen), frozen, save)
