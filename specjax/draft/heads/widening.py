"""`widen_head`: a drafter and its parameters for a target that `specjax.models.widen` made wider."""

import dataclasses
from typing import Any

from specjax.draft.adaptive import RuledDrafter
from specjax.draft.base import Drafter
from specjax.draft.feature import SIZES, sizes
from specjax.draft.fuse import Fused
from specjax.draft.padded import PaddedLM
from specjax.draft.rest import Rest
from specjax.draft.switch import Switch
from specjax.draft.trim import TrimmedLM
from specjax.models.llama import LlamaLM
from specjax.models.model_config import ModelConfig
from specjax.models.widening import check_times, tiled, wider_config, wider_lm

PyTree = Any


def widen_head(drafter: Drafter, params: PyTree, k: int) -> tuple[Drafter, PyTree]:
    """A drafter and its parameters, k times as wide: its drafts for the widened target equal those for the original one.

    A draft model is widened in the same way as a target. A datastore, and drafters without parameters, stay as they
    are.

    Args:
      drafter: bound to its target before that was widened.
      params: its own, `params["draft"]`.
      k: the factor, see `specjax.models.widen`.

    Returns:
      The drafter, for the widened target, and its parameters.

    Raises:
      ValueError: for k below 1, a drafter that has parameters and no rule, or one that is not bound yet.
    """
    check_times(k)
    if isinstance(drafter, Fused):
        parts = (None, None) if params is None else params
        (a, first), (b, second) = (widen_head(d, own, k) for d, own in zip((drafter.a, drafter.b), parts, strict=True))
        return dataclasses.replace(drafter, a=a, b=b), None if params is None else (first, second)
    if isinstance(drafter, Switch):
        parts = (None,) * len(drafter.members) if params is None else params
        made = [widen_head(member, own, k) for member, own in zip(drafter.members, parts, strict=True)]
        members, owns = (tuple(each) for each in zip(*made, strict=True))
        return dataclasses.replace(drafter, members=members), None if params is None else owns
    if isinstance(drafter, RuledDrafter):
        own = params or {"drafter": None, "rule": None}
        inner, first = widen_head(drafter.drafter, own["drafter"], k)
        rule = tiled({"head": own["rule"]}, k, 1)["head"]  # it reads one feature
        changes: dict[str, Any] = {"drafter": inner}
        return dataclasses.replace(drafter, **changes), None if params is None else {"drafter": first, "rule": rule}
    wide = dataclasses.replace(drafter, **_sizes(drafter, k))
    if params is None or isinstance(drafter, Rest):
        return wide, params
    return wide, drafter.widened(params, k, _width(drafter))


def _sizes(drafter: Drafter, k: int) -> dict[str, Any]:
    """The drafter's fields that depend on a width, widened: configs, its target, its own model, and its choices of sizes."""
    fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    wide = {name: _wider(value, k) for name, value in fields.items() if _has_width(value)}
    chosen = sizes(wide["config"]) if fields.keys() >= SIZES.keys() and "config" in wide else {}
    return wide | chosen


def _has_width(value: Any) -> bool:
    return isinstance(value, (ModelConfig, LlamaLM, PaddedLM, TrimmedLM))


def _wider(value: Any, k: int) -> Any:
    if isinstance(value, TrimmedLM):
        changes: dict[str, Any] = {"lm": _wider(value.lm, k)}
        return dataclasses.replace(value, **changes)
    if isinstance(value, PaddedLM):
        return PaddedLM(_wider(value.lm, k), value.vocab_size)
    return wider_config(value, k) if isinstance(value, ModelConfig) else wider_lm(value, k)


def _width(drafter: Any) -> int:
    """E of the model that its parameters belong to."""
    lm = drafter.lm if hasattr(drafter, "lm") else getattr(drafter, "target", None)
    config = getattr(lm, "config", None)
    if not isinstance(config, ModelConfig):
        what = "is not bound to a target yet" if lm is None else f"drafts with or for a {type(lm).__name__}"
        raise ValueError(f"{type(drafter).__name__} cannot be widened: it {what}; bind it to one of the Llama family")
    own = getattr(drafter, "config", None)
    if own is not None and own.hidden_size != config.hidden_size:
        raise ValueError(
            f"{type(drafter).__name__} cannot be widened: its head is {own.hidden_size} wide, its target "
            f"{config.hidden_size}"
        )
    return config.hidden_size
