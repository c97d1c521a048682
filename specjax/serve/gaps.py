"""Requests of models that fill in: with a suffix after the new text, or with a text that has gaps."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models.text import Chat, check_unicode, gapped
from specjax.prompts import OPEN
from specjax.sampling_params import FIELDS, in_use, is_set
from specjax.serve.request import Request
from specjax.warpers import WARPERS


def gaps_of(model: Any, prompt: Any, chat: Chat | None, suffix: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request whose prompt is a text with gaps; empty if it has none, or the model takes none.

    Args:
      model: the engine's.
      prompt: see `specjax.models.text.gapped`.
      chat: how messages are written.
      suffix: the user's, or None.
      options: the prompt's, as the user gave them.

    Raises:
      ValueError: on an unusable prompt, and on a suffix or a limit of new tokens beside gaps.
    """
    if not model.any_subset:
        return {}
    ids = gapped(model, prompt, chat)
    places = [i for i, token in enumerate(ids) if token == OPEN]
    if not places:
        return {}
    if len(places) == len(ids):
        raise ValueError("the prompt is one gap: give at least one token that is known")
    for name, given in (("suffix", suffix), ("max_new_tokens", options.get("max_new_tokens"))):
        if given is not None:
            raise ValueError(f"the prompt has gaps of its own, which are filled in: leave {name} out, or the gaps")
    if len(ids) > model.max_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, more than the {model.max_length} positions of {model.name}"
        )
    first, last = places[0], places[-1] + 1
    return {
        "ids": ids[:first], "gaps": ids[first:last], "suffix_ids": ids[last:], "max_new_tokens": last - first,
    }  # fmt: skip


def filled_in(engine: Any, request: Request, suffix: Any) -> Request:
    """A request of a model that fills in, checked, with its suffix.

    Raises:
      ValueError: on options that such models lack, and on a suffix that cannot be used.
    """
    model, decoder = engine.model, engine.decoder
    for warper in WARPERS:
        if (warper.of_logits or warper.reads_text) and not warper.fills and in_use(warper, request):
            name = next(name for name in warper.switches if is_set(name, getattr(request, name)))
            usual = "leave it out" if FIELDS[name].default == () else f"leave it at {FIELDS[name].default:g}"
            raise ValueError(f"{model.kind.removeprefix('an ').removeprefix('a ')}s have no {name}: {usual}")
    if suffix is None:
        end = min(len(request.ids) + request.max_new_tokens, engine.max_length)
        decoder.check_row(np.asarray(request.ids), end)
        return request
    if not decoder.fills_in:
        raise ValueError(
            f"{model.name} with {type(decoder).__name__} writes from left to right: it cannot fill in before a suffix"
        )
    tokenizer = model.tokenizer
    if isinstance(suffix, str):
        check_unicode(suffix, "suffix")
    if isinstance(suffix, str) and tokenizer is not None:  # a suffix is mid-text, so it has no special tokens
        after = engine.encode(tokenizer.encode(suffix, add_special_tokens=False, verbose=False), "suffix")
    else:
        after = engine.encode(suffix, "suffix")
    total = len(request.ids) + request.max_new_tokens + len(after)
    if total > engine.max_length:
        raise ValueError(
            f"the suffix is too long: {len(request.ids)} tokens of prompt, {request.max_new_tokens} new ones and "
            f"{len(after)} of suffix are more than the {engine.max_length} positions of {model.name}"
        )
    decoder.check_row(np.asarray(request.ids), total)
    return dataclasses.replace(request, suffix=suffix, suffix_ids=after)
