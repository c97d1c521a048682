"""The decoders of a plan that asks for another way than drafting: searches, and soft thinking."""

import dataclasses
from typing import Any

import jax

from specjax.assembly.passes import SETTINGS, target_of
from specjax.assembly.registry import make_mixer
from specjax.sampling.processors import checked
from specjax.search import BeamSearch, Search, StochasticBeamSearch, Superposed
from specjax.soft import Mixer, soft_thinking

OF_BEAMS = ("num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping")
OF_SUPERPOSED = ("superposed_tokens", "superposed_temperature", "superposed_alpha", "superposed_ngrams")
OF_SOFT = ("end_of_think",)
WAYS = {
    "num_beams": ("a beam search", "set num_beams to 2 or more", OF_BEAMS),
    "stochastic_beams": ("a stochastic beam search", "set stochastic_beams", ()),
    "superposed_drafts": ("superposed decoding", "set superposed_drafts", OF_SUPERPOSED),
    "soft_thinking": ("soft thinking", "set soft_thinking", OF_SOFT),
}
"""The setting of a plan that asks for each: what errors call it, what asks for it, and the settings that are its own."""
NAMES = tuple(name for way, (_, _, own) in WAYS.items() for name in (way, *own))
THINK = "</think>"
"""The token that ends thinking where none is named, in vocabularies that have it."""


def way_of(plan: Any) -> str:
    """The way that a plan asks for, a key of `WAYS`; empty: none of them.

    Raises:
      ValueError: where it asks for two, or has a setting of one that it does not ask for.
    """
    chosen = [way for way in WAYS if asked(plan, way)]
    if len(chosen) > 1:
        raise ValueError(f"{chosen[0]} and {chosen[1]} are two ways to decode: leave one of them out")
    for way, (called, how, own) in WAYS.items():
        if way not in chosen and (wrong := [name for name in own if asked(plan, name)]):
            raise ValueError(f"{wrong[0]} is a setting of {called}: {how}, or leave it out")
    return "".join(chosen)


def asked(plan: Any, name: str) -> bool:
    """Whether a plan sets something."""
    return getattr(plan, name) != type(plan).__dataclass_fields__[name].default


def searching(model: Any, plan: Any, mesh: Any) -> tuple[Any, Any]:
    """The search that a plan asks for, and its parameters.

    Raises:
      ValueError: on what it does not go with.
    """
    search = _search(model, plan)
    if wrong := [name for name in ("drafter", "verifier") if getattr(plan, name) not in (None, "", "none")]:
        raise ValueError(
            f"{search.called} reads one token of every text a step, and drafts nothing: leave {wrong[0]} out, or {search.off}"
        )
    if plan.logprobs:
        raise ValueError(
            f"records of {search.called} carry a score, of the whole text: leave logprobs out, or ask `specjax score` for the "
            "log-probabilities of its tokens"
        )
    if wrong := [name for name in SETTINGS if asked(plan, name)]:
        raise ValueError(f"{search.called} reads its texts in one pass: leave {wrong[0]} out, or {search.off}")
    processors = checked(plan.logits_processors, model.lm.vocab_size)
    params = {"target": model.params}
    if plan.superposed_ngrams is not None:
        from specjax.draft.heads.datastore import load_datastore

        params["ngrams"] = load_datastore(plan.superposed_ngrams, model, mesh)
    search = dataclasses.replace(search, mesh=mesh, processors=processors)
    if mesh is not None and not model.abstract:
        params = jax.device_put(params, search.param_shardings(params))
    return search, params


def _search(model, plan) -> Search:
    if plan.superposed_drafts:
        if plan.superposed_ngrams is None and asked(plan, "superposed_alpha"):
            raise ValueError(
                "superposed_alpha is the share of n-grams: name a datastore by superposed_ngrams, or leave it out"
            )
        return Superposed(
            model.lm,
            plan.superposed_drafts,
            plan.superposed_tokens,
            plan.superposed_temperature,
            plan.superposed_alpha,
            plan.superposed_ngrams is not None,
        )
    if plan.stochastic_beams:
        return StochasticBeamSearch(model.lm, plan.stochastic_beams)
    return BeamSearch(
        model.lm,
        plan.num_beams,
        plan.num_beam_groups,
        plan.diversity_penalty,
        plan.length_penalty,
        plan.early_stopping,
    )


def thinking(model: Any, plan: Any, mesh: Any) -> tuple[Any, Any]:
    """The decoder of soft thinking, and its parameters.

    Raises:
      ValueError: on what it does not go with.
    """
    if wrong := [name for name in ("drafter", "verifier") if getattr(plan, name) not in (None, "", "none")]:
        raise ValueError(
            "soft thinking reads mixtures of tokens, and what follows them is no law of a text that a draft could be verified "
            f"by: leave {wrong[0]} out, or soft_thinking"
        )
    mixer = make_mixer(plan.soft_thinking) if isinstance(plan.soft_thinking, str) else plan.soft_thinking
    if not isinstance(mixer, Mixer):
        raise ValueError("soft_thinking must be a line of text or a mixer (`specjax.soft`)")
    target, target_params = target_of(model, plan, mesh)
    decoder = soft_thinking(
        target,
        mixer,
        end_of_think=_end(model, plan.end_of_think),
        logprobs=plan.logprobs,
        mesh=mesh,
        processors=plan.logits_processors,
    )
    params = {"target": target_params, "draft": None}
    if mesh is not None and not model.abstract:
        params = jax.device_put(params, decoder.param_shardings(params))
    return decoder, params


def _end(model, asked) -> int:
    """The id of the token that ends thinking; -1: none does."""
    words = model.tokenizer
    if asked is None:
        return -1 if words is None else words.get_vocab().get(THINK, -1)
    if isinstance(asked, int) and not isinstance(asked, bool):
        if not 0 <= asked < model.lm.vocab_size:
            raise ValueError(f"end_of_think {asked} is outside the vocabulary of {model.lm.vocab_size} tokens")
        return asked
    if words is None or not isinstance(asked, str):
        raise ValueError("end_of_think is a token: give its id, or its text where the model has a tokenizer")
    ids = words.encode(asked, add_special_tokens=False, verbose=False)
    if len(ids) != 1:
        raise ValueError(
            f"end_of_think must be one token, and {asked!r} is {len(ids)} of {model.name}: give the id of one"
        )
    return ids[0]
