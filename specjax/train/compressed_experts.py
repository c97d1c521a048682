"""The task of compressed experts: vectors that stand for some of a token's experts (arXiv:2503.00634)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.draft.main_experts.folder import save_vectors
from specjax.draft.main_experts.objective import TrainCompressedExperts
from specjax.models import hf_config, routing
from specjax.sharding.distributed import is_first
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, fields_of, refuse

NAME = "compressed_experts"


def compressed_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a mixture of experts: its own parameters and vectors, or the vectors alone.

    Raises:
      ValueError: on options or a target that do not suit.
    """
    foreign = ("draft", "draft_config", "reference", "draft_vocabulary", "start", "loss", "features")
    refuse(options, foreign, f"{NAME}, which learns the text's own tokens")
    if target.masked is not None:
        raise ValueError(f"{NAME} trains autoregressive models, and {target.name} is {target.kind}")
    (fields,) = fields_of(options.drafter, TrainCompressedExperts)
    found = routing.experts_of(target.lm, NAME)
    if any(experts.vectors for experts in found):
        raise ValueError(f"{target.name} has compressed experts already: `specjax train lm` goes on with them")
    each = min(experts.num_experts_per_tok for experts in found)
    count = fields.get("n_ce", 0) or each // 2
    if not 0 < count < each:
        raise ValueError(f"{NAME}: n_ce must be from 1 to {each - 1} of the {each} experts of a token, got {count}")
    lm = routing.compressed(target.lm, each - count, NAME)
    hf_config.to_hf(lm.config)  # a model that no file can describe is an error before it is trained
    check_length(options, lm)
    if target.weights is not None:
        raise ValueError(
            f"{NAME} needs derivatives of {target.name}'s experts, and those in few bits ({target.weights}) have none: leave "
            "out --weights, or say --weights plain"
        )
    objective = TrainCompressedExperts(lm, **fields)
    params = objective.init(jax.random.key(options.seed), target.params)
    if objective.only_vectors:

        def save_own(folder: Path, params: Any) -> None:
            if is_first():
                save_vectors(folder, lm, params, options.save_dtype)

        return Task(objective, params, target.params, save_own)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)  # small updates would be lost otherwise
    # nothing else of the target outlives this
    tokenizer, eos_ids, generation, dual = target.tokenizer, target.eos_ids, target.generation, target.dual

    def save_all(folder: Path, params: Any) -> None:
        if is_first():
            models.save(folder, lm, params, options.save_dtype, tokenizer, eos_ids, dual, generation=generation)

    return Task(objective, params, None, save_all)
