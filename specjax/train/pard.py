"""The tasks of PARD and PARD-2: a draft model that learns to draft from mask tokens (arXiv:2504.18583, 2605.08632)."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.assembly.models_beside import check_vocabulary, draft_model, fitting
from specjax.draft.masks_on_disk import PARD, named_mask
from specjax.draft.pard.objective import TrainPard
from specjax.draft.pard2.features import Joined
from specjax.draft.pard2.folder import is_joined, joined_fields, read_joined, write_projection
from specjax.draft.pard2.objective import TrainPard2
from specjax.models.embedding import EmbeddingConfig
from specjax.sharding.distributed import is_first
from specjax.train.options import TrainOptions
from specjax.train.task import Read, Task, check_length, divergence_of, fields_of, refuse

_SPARE = re.compile(r"[<\[].*(mask|reserved|unused)")
"""The beginning of names of tokens that no text of an autoregressive model has."""


def pard_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a PARD model that starts from a draft model."""
    draft = started("pard", target, options)
    (fields,) = fields_of(options.drafter, TrainPard)
    draft, mask = with_mask("pard", draft, target, options, fields.pop("mask", -1))
    objective = TrainPard(target.lm, fitting(draft, target, mask), mask=mask, **fields, **divergence_of(options))

    def save(folder: Path, params: Any) -> None:
        written(folder, draft, target, options, params, {PARD: mask, "spd_type": "pard"})

    return Task(objective, draft.params, target.params, save)


def pard2_task(target: Any, options: TrainOptions, read: Read) -> Task:
    """The task of a PARD-2 model that starts from a draft model, a PARD model or a PARD-2 model."""
    draft = started("pard2", target, options)
    fields, told = fields_of(options.drafter, TrainPard2, Joined)
    joined, fc = begun(target, options, draft, told)
    draft, mask = with_mask("pard2", draft, target, options, fields.pop("mask", -1))
    objective = TrainPard2(
        target.lm, fitting(draft, target, mask), mask=mask, joined=joined, **fields, **divergence_of(options)
    )
    fc = fc or jax.jit(objective.projection)(jax.random.key(options.seed))

    def save(folder: Path, params: Any) -> None:
        written(folder, draft, target, options, params["lm"], joined_fields(mask, joined, objective.joined_size))
        if is_first():
            write_projection(folder, params["fc"], options.save_dtype or draft.dtype)

    return Task(objective, {"lm": draft.params, "fc": fc}, target.params, save)


def begun(target: Any, options: TrainOptions, draft: Any, told: dict[str, Any]) -> tuple[Joined, Any]:
    """What is read of the target, and the projection of a PARD-2 model's folder; None of another one, which has none.

    Args:
      target: the target.
      options: of the command.
      draft: the draft model that training starts from.
      told: the fields of `Joined` that the line sets.

    Raises:
      ValueError: if the line contradicts the folder.
    """
    layers = target.lm.num_layers
    if not is_joined(draft):
        return Joined(**told).of(layers), None
    joined, fc = read_joined(str(options.draft), draft, target)
    for name, value in told.items():
        if value != (own := getattr(joined, name)):
            raise ValueError(
                f"pard2: {name} is {value!r}, and {draft.name!r} was trained with {own!r}: leave {name} out to go on from it"
            )
    return joined, fc


def started(name: str, target: Any, options: TrainOptions) -> Any:
    """The draft model that training starts from.

    Raises:
      ValueError: on options or models that do not suit.
    """
    refuse(options, ("draft_config", "reference", "draft_vocabulary", "start"), f"{name}, which starts from --draft")
    if options.draft is None:
        raise ValueError(f"{name} needs --draft, the draft model that it starts from")
    if target.masked is not None:
        raise ValueError(f"{name} drafts for an autoregressive model, and {target.name} is {target.kind}")
    draft = draft_model(options.draft, dataclasses.replace(target, dtype="float32"), None)
    if not isinstance(draft.lm, models.LlamaLM):
        raise ValueError(f"{name} trains models of the Llama family, and {draft.name} is a {type(draft.lm).__name__}")
    return draft


def with_mask(name: str, draft: Any, target: Any, options: TrainOptions, asked: int) -> tuple[Any, int]:
    """The draft model with a row for the mask, and the mask's id; see `chosen_mask`."""
    mask = chosen_mask(draft, asked, named_mask(draft, PARD), name)
    draft = with_row(draft) if mask == draft.lm.vocab_size else draft
    check_vocabulary(draft, target, besides=mask)
    check_length(options, draft.lm)
    return draft, mask


def written(folder: Path, draft: Any, target: Any, options: TrainOptions, params: Any, fields: Any) -> None:
    """Writes a trained draft model with further fields of `config.json`."""
    if is_first():
        models.save(folder, draft.lm, params, options.save_dtype, target.tokenizer, target.eos_ids, fields=fields)


def chosen_mask(draft: Any, asked: int, named: int | None, what: str) -> int:
    """The id of the mask for a draft model: as asked for, or as its folder `named` it, or one that no text has.

    The last is the first row without a token, or the last token that is called mask, reserved or unused. The id after
    the last row, `vocab_size`, stands for a row that is still to be added.

    `what` is the method's name in the error.

    Raises:
      ValueError: for an id that the model cannot have.
    """
    size = draft.lm.vocab_size
    if not -1 <= asked <= size:
        raise ValueError(f"{what}: mask {asked} is outside the {size} tokens of {draft.name!r}; {size} adds one")
    if asked >= 0:
        return asked
    if named is not None:
        return named
    tokens = {} if draft.tokenizer is None else draft.tokenizer.get_vocab()
    if tokens and (free := sorted({*range(size)} - {*tokens.values()})):
        return free[0]
    return max((number for token, number in tokens.items() if _SPARE.match(token)), default=size)


def with_row(draft: Any) -> Any:
    """The model with one more token, whose rows are the means of the others."""
    size = draft.lm.vocab_size + 1
    lm = dataclasses.replace(draft.lm, config=draft.lm.config.every(EmbeddingConfig, vocab_size=size))

    def grown(x, wanted):
        for axis in range(x.ndim):
            if x.shape[axis] + 1 == wanted.shape[axis]:
                x = jnp.concatenate([x, x.mean(axis=axis, keepdims=True)], axis=axis)
        return x

    return dataclasses.replace(draft, lm=lm, params=jax.tree.map(grown, draft.params, lm.abstract()))
