"""Models whose tokens take other experts than those that were trained together: fewer, or later ones in the order of choice."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.models.experts import ExpertsConfig
from specjax.models.hf_experts import uncompressed
from specjax.models.llama import LlamaLM
from specjax.models.mapped import Mapped

PyTree = Any


def experts_of(lm: Any, asks: str) -> tuple[ExpertsConfig, ...]:
    """The different kinds of experts in a model's layers, in order.

    Args:
      lm: the model.
      asks: what needs them, for the error.

    Raises:
      ValueError: if it has none.
    """
    own = lm.lm if isinstance(lm, Mapped) else lm
    layers = own.config.layers if isinstance(own, LlamaLM) else ()
    found = tuple(dict.fromkeys(layer.experts for layer in layers if layer.experts is not None))
    if not found:
        raise ValueError(f"{asks} chooses among a model's experts, and this one has none: load a mixture of experts")
    return found


def routed(lm: Any, first: int, count: int, asks: str) -> Any:
    """The same model, with the same parameters, where every token takes `count` experts from the rank `first` on.

    Ranks follow the model's own order of choice, with its bias and groups. Weights are the model's own for these experts: a
    sum that they are divided by is that of the taken ones. Shared experts stay.

    Args:
      lm: a `LlamaLM`, or a `Mapped` of one.
      first: counted from 1, the best.
      count: at least 1.
      asks: what needs that, for errors.

    Raises:
      ValueError: for a model without experts, or one with fewer to choose from.
    """
    found, last = experts_of(lm, asks), first - 1 + count
    if any(experts.auxiliary for experts in found):
        raise ValueError(
            f"{asks} chooses other experts, and this model leaves some of the chosen ones out: load another one"
        )
    if first < 1 or count < 1:
        raise ValueError(f"{asks} counts experts from 1, the best of a token, got {min(first, count)}")
    if last > (room := min(experts.choices for experts in found)):
        raise ValueError(f"{asks} asks for expert {last} of a token, and this model's choose from {room}")
    if isinstance(lm, Mapped):
        return dataclasses.replace(lm, lm=routed(lm.lm, first, count, asks))
    config = lm.config.every(ExpertsConfig, first_rank=first, num_experts_per_tok=count)
    return dataclasses.replace(lm, config=config)


def main_alone(lm: Any, keep: int, asks: str) -> Any:
    """The same model, with the same parameters, where a token's first `keep` experts are computed and no others.

    Weights are those that these experts have among all of the token's, so the weights of the others are lost
    (arXiv:2503.00634). `routed` differs from it in routers that divide weights by their sum. Shared experts stay.

    Args:
      lm: a `LlamaLM`, or a `Mapped` of one.
      keep: fewer than a token has in any layer, and at least 1.
      asks: what needs that, for errors.

    Raises:
      ValueError: for a model without experts, and for another `keep`.
    """
    most = min(experts.main for experts in experts_of(lm, asks))
    if not 0 < keep < most:
        raise ValueError(f"{asks} keeps at least one expert of a token and fewer than its {most}, got {keep}")
    if isinstance(lm, Mapped):
        return dataclasses.replace(lm, lm=main_alone(lm.lm, keep, asks))
    left = lambda experts: dataclasses.replace(experts, auxiliary=experts.num_experts_per_tok - keep)
    return dataclasses.replace(lm, config=lm.config.mapped(ExpertsConfig, left))


def compressed(lm: Any, keep: int, asks: str) -> Any:
    """The same model with compressed experts: vectors stand for all of a token's experts but the first `keep`.

    Its parameters are the model's, `joined` with vectors; see `specjax.models.compressed`.

    Args:
      lm: a `LlamaLM`.
      keep: see `main_alone`.
      asks: see `main_alone`.

    Raises:
      ValueError: see `main_alone`; also for a `Mapped`, and for experts that vectors cannot stand for.
    """
    alone = main_alone(lm, keep, asks)
    if isinstance(alone, Mapped):
        raise ValueError(
            f"{asks} adds vectors to a model's parameters, and these are another library's: leave vectors out"
        )
    if why := uncompressed(alone.config):
        raise ValueError(f"{asks}: vectors cannot stand for {why}: leave vectors out, or load another model")
    return dataclasses.replace(alone, config=alone.config.every(ExpertsConfig, vectors=True))


def ones(lm: LlamaLM, dtype: Any = jnp.float32) -> PyTree:
    """Vectors that change nothing, for `joined`: `[X, 3, E]` for every layer with experts."""
    of = lambda experts: jnp.ones((experts.num_experts, 3, lm.config.hidden_size), dtype)
    found = {i: layer.experts for i, layer in enumerate(lm.config.layers)}
    return {"layers": {i: {"mlp": {"ces": of(own)}} for i, own in found.items() if own is not None}}


def joined(params: PyTree, vectors: PyTree) -> PyTree:
    """A model's parameters with vectors; the same numbers, in the nested dicts that the model of `compressed` reads."""
    layers = dict(params["layers"])
    for i, own in vectors["layers"].items():
        layers[i] = {**layers[i], "mlp": {**layers[i]["mlp"], **own["mlp"]}}
    return {**params, "layers": layers}
