"""Tasks that train whole models: draft models, and a model's own parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import models
from specjax.assembly.companions import drafter_to_train
from specjax.draft.gad.objective import TrainGad
from specjax.draft.head import most_frequent
from specjax.draft.heads.compact_folder import save_compact
from specjax.draft.lud.objective import TrainLud
from specjax.draft.main_experts.objective import TrainCompressedExperts
from specjax.draft.pard.objective import TrainPard
from specjax.draft.pard2.objective import TrainPard2
from specjax.draft.s2d.objective import TrainS2D
from specjax.draft.self_diffusion.objective import TrainSelfDiffusion
from specjax.objectives.any_subset import AnySubsetLoss
from specjax.objectives.masked import (
    CertaintyForcing,
    ConfidenceAware,
    Conversion,
    MaskedDiffusion,
    MaskedObjective,
)
from specjax.objectives.next_token import NextToken
from specjax.objectives.pat import Pat
from specjax.search.merged_prompts.objective import TrainMergedPrompts
from specjax.sharding.distributed import is_first
from specjax.train.any_subset import any_subset_task
from specjax.train.both_kinds import both_kinds_task
from specjax.train.compressed_experts import compressed_task
from specjax.train.conversion import a2d_task
from specjax.train.distill import Distill
from specjax.train.gad import gad_task
from specjax.train.language_model import lm_task
from specjax.train.lexical_units import lud_task
from specjax.train.merged_prompts import merged_task
from specjax.train.new_draft import check_all_tokens, new_draft
from specjax.train.options import TrainOptions
from specjax.train.pard import pard2_task, pard_task
from specjax.train.pruned import pat_task
from specjax.train.sorted_draft import s2d_task
from specjax.train.task import (
    Make,
    Making,
    Read,
    Task,
    check_length,
    check_masked,
    check_plain,
    divergence_of,
    fields_of,
)


def _distill(target: Any, options: TrainOptions, read: Read) -> Task:
    if options.draft_vocabulary is not None and options.draft_config is None:
        raise ValueError(
            "--draft-vocabulary is for heads and new draft models (--draft-config): --draft has its tokens"
        )
    if options.start is not None:
        raise ValueError("--start is for heads; a draft model starts from --draft")
    if target.masked is not None:
        raise ValueError(f"distill teaches a draft of an autoregressive model, and {target.name} is {target.kind}")
    (fields,) = fields_of(options.drafter, Distill)
    if (options.draft is None) == (options.draft_config is None):
        raise ValueError("distill needs one of --draft (a small model) and --draft-config (a small model's shape)")
    if (fields.get("keep", 1.0) < 1) != (options.reference is not None):
        raise ValueError("distill: keep below 1 and --reference (a distilled copy of the draft) need each other")
    full = dataclasses.replace(target, dtype="float32")  # small updates would be lost in the target's own type
    ids: tuple[int, ...] = ()
    check_all_tokens(options.draft, options.reference)
    if options.draft is not None:
        drafter, params = drafter_to_train(options.draft, full)
        lm: Any = drafter.lm
    else:
        if options.draft_vocabulary is not None:
            counts = read().counts(target.lm.vocab_size)
            ids = tuple(most_frequent(counts, options.draft_vocabulary, target.eos_ids).tolist())
        lm = new_draft(str(options.draft_config), target, len(ids))
        params = lm.init(jax.random.key(options.seed))
    check_length(options, lm)
    frozen = target.params
    if options.reference is not None:
        reference, reference_params = drafter_to_train(options.reference, full)
        if reference.lm != lm:
            raise ValueError(f"--reference {options.reference!r} is not a model of the draft's shape")
        frozen = (target.params, reference_params)
    objective = Distill(target.lm, lm, eos_ids=target.eos_ids, ids=ids, **fields, **divergence_of(options))

    def save(folder: Path, params: Any) -> None:
        if ids:
            save_compact(folder, lm, objective.export(params), target, options.save_dtype)
        elif is_first():
            models.save(folder, lm, params, options.save_dtype, target.tokenizer, target.eos_ids)

    return Task(objective, params, frozen, save)


def _masked(name: str, kind: type[MaskedObjective]) -> Make:
    """The task of a diffusion model's own parameters."""

    def make(target: Any, options: TrainOptions, read: Read) -> Task:
        check_masked(name, target, options, blocks=kind.blockwise)
        check_plain(name, target)
        (fields,) = fields_of(options.drafter, kind)
        own = target.masked
        made = kind(target.lm, own.mask_id, own.shift, block=own.block or None, align=own.align, **fields)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)  # small updates must not be lost

        def save(folder: Path, params: Any) -> None:
            if is_first():
                models.save(
                    folder, target.lm, params, options.save_dtype, target.tokenizer, target.eos_ids, target.masked,
                    generation=target.generation,
                )  # fmt: skip

        return Task(made, params, None, save)

    return make


WHOLE_MODELS: dict[str, Making] = {
    "distill": Making(Distill, _distill),
    "lm": Making(NextToken, lm_task),
    "s2d": Making(TrainS2D, s2d_task),
    "lud": Making(TrainLud, lud_task),
    "self_diffusion": Making(TrainSelfDiffusion, both_kinds_task),
    "pard": Making(TrainPard, pard_task),
    "pard2": Making(TrainPard2, pard2_task),
    "gad": Making(TrainGad, gad_task),
    "compressed_experts": Making(TrainCompressedExperts, compressed_task),
    "a2d": Making(Conversion, a2d_task),
    "pat": Making(Pat, pat_task),
    "merged_prompts": Making(TrainMergedPrompts, merged_task),
    "diffusion": Making(MaskedDiffusion, _masked("diffusion", MaskedDiffusion)),
    "any_subset": Making(AnySubsetLoss, any_subset_task),
    "cap": Making(ConfidenceAware, _masked("cap", ConfidenceAware)),
    "dparallel": Making(CertaintyForcing, _masked("dparallel", CertaintyForcing)),
}
"""By name."""
