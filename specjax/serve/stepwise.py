"""Methods that run step by step on the host, as an engine's turns."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.models.generation import defaults
from specjax.models.text import Chat
from specjax.sampling_params import FIELDS
from specjax.search import Stepwise, Written
from specjax.serve.request import Record, Request
from specjax.serve.slots import Timing, Turn
from specjax.serve.watch import OnText

_ENDS = {"budget": "length"}
"""Finish reasons of a method that records name differently."""


def stepwise_options(method: Stepwise, options: Mapping[str, Any], chat: bool | Chat) -> dict[str, Any]:
    """The options of a prompt for a method, on top of its authors' sampling settings.

    Raises:
      ValueError: on an option that the method does not use.
    """
    name = type(method).__name__
    if options.get("ignore_eos"):
        raise ValueError(f"{name} has texts that end by themselves: leave ignore_eos out, or decode otherwise")
    if isinstance(chat, Chat) and chat != Chat():
        raise ValueError(f"{name} writes chats by the template alone: give chat=True, or decode otherwise")
    return method.published({name: value for name, value in options.items() if value is not None})


def stepwise_turns(
    method: Stepwise,
    model: Any,
    requests: Sequence[Request],
    keys: np.ndarray,
    timing: Timing,
    *,
    slots: int,
    on_text: OnText | None = None,
) -> Iterator[Turn]:
    """Yields a turn for every few requests with the same options.

    Args:
      method: bound to its model.
      model: the model.
      requests: in the order of their indices.
      keys: their `Engine.keys`.
      timing: receives the time spent.
      slots: how many texts are written side by side.
      on_text: called with a request's index and its text, once it is finished.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, request in enumerate(requests):
        key = (request.max_new_tokens, request.seed, *[repr(getattr(request, name)) for name in FIELDS])
        alike.setdefault(key, []).append(index)
    for indices in alike.values():
        rows = min(slots, len(indices))
        for at in range(0, len(indices), rows):
            part = indices[at : at + rows]
            whole = [*part, *[part[-1]] * (rows - len(part))]  # padded, so that the last part needs no separate program
            began = time.perf_counter()
            found = _written(method, model, [requests[i] for i in whole], keys[whole], rows)[: len(part)]
            timing.decode_seconds += time.perf_counter() - began
            records = [(i, _record(requests[i], own)) for i, own in zip(part, found, strict=True)]
            for i, own in records:
                if on_text is not None and own.text:
                    on_text(i, own.text)
            tokens, steps = (sum(getattr(own, name) for _, own in records) for name in ("new_tokens", "steps"))
            timing.new_tokens, timing.steps = timing.new_tokens + tokens, timing.steps + steps
            yield Turn(records, tokens, steps, max(own.steps for _, own in records))


def _written(method, model, requests, keys, rows) -> list[Written]:
    first, usual = requests[0], defaults(model)
    own = {name: getattr(first, name) for name in FIELDS}
    sampling = {name: value for name, value in own.items() if name in usual or _differs(value, FIELDS[name].default)}
    sampling["temperature"] = first.temperature
    how = {"max_new_tokens": first.max_new_tokens, "seed": first.seed, "batch_size": rows, "keys": keys}
    return method(model, [request.prompt for request in requests], **how, **sampling)


def _differs(value: Any, default: Any) -> bool:
    return repr(value) != repr(default) and not (isinstance(value, np.ndarray) and not value.size)


def _record(request: Request, own: Written) -> Record:
    failed = own.finish_reason == "error"
    return Record(
        prompt=request.prompt,
        text=own.text,
        tokens=list(own.tokens),
        finish_reason=_ENDS.get(own.finish_reason, own.finish_reason),
        new_tokens=len(own.tokens),
        steps=own.passes,
        tokens_per_step=round(len(own.tokens) / own.passes, 4) if own.passes else 0.0,
        id=request.id,
        line=request.line,
        error=own.error or ("the model's logits were not finite (NaN or infinite)" if failed else None),
        sample=request.sample,
        score=own.score,
    )
