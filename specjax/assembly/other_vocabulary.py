"""Draft models whose tokens are others than the target's, wrapped as they are loaded."""

import dataclasses
from typing import Any

import jax

from specjax.draft.vocabularies import SharedLM
from specjax.draft.vocabularies.pieces import piece_arrays
from specjax.draft.vocabularies.tables import Words, tables
from specjax.models import tokenizer
from specjax.sharding.rules import replicated


def shared(draft: Any, target: Any, mesh: Any = None, texts: bool = False) -> tuple[SharedLM, Any]:
    """A draft model and its parameters over the tokens that it shares with a target.

    Args:
      draft: from `specjax.models.load`.
      target: the same.
      mesh: where the parameters are.
      texts: whether they have the arrays that cut texts into the target's tokens, too.

    Raises:
      ValueError: if a tokenizer does not tell what its tokens write, or they share none.
    """
    draft, target = map(_with_tokenizer, (draft, target))
    without = next((model.name for model in (draft, target) if model.tokenizer is None), None)
    if without is not None:
        raise ValueError(f"{without!r} has no tokenizer, so nothing tells which tokens the draft model shares: add one")
    try:
        ours, theirs = Words.of(target), Words.of(draft)
        made = tables(ours, theirs)
    except ValueError as error:
        raise ValueError(
            f"the draft model {draft.name!r} has another vocabulary than {target.name!r}, and no tokens can be shared "
            f"({error}): pick one with the target's tokenizer"
        ) from error
    arrays: Any = made.arrays | (piece_arrays(ours.texts, theirs.texts) if texts else {})
    if target.abstract:
        arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    if mesh is not None:
        how = replicated(mesh, arrays)
        place = lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)
        arrays = jax.tree.map(place, arrays, how) if target.abstract else jax.device_put(arrays, how)
    elif not target.abstract:
        arrays = jax.device_put(arrays)
    return SharedLM.of(draft.lm, made), {"lm": draft.params, **arrays}


def _with_tokenizer(model: Any) -> Any:
    """A model of shapes alone with the tokenizer of its folder, which was not read."""
    if not model.abstract or model.tokenizer is not None or model.path is None or not model.path.is_dir():
        return model
    return dataclasses.replace(model, tokenizer=tokenizer.load(model.path))
