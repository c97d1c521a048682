"""Methods that go step by step on the host, as an engine's turns."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specjax.sampling_params import FIELDS
from specjax.search import Stepwise, Written
from specjax.serve.request import Record, Request
from specjax.serve.slots import Timing, Turn

_ENDS = {"budget": "length"}
"""Ends of a method's texts that records call otherwise."""


def stepwise_turns(
    method: Stepwise, model: Any, requests: Sequence[Request], timing: Timing, *, slots: int
) -> Iterator[Turn]:
    """A turn for every few requests of like options.

    Args:
      method: bound to its model.
      model: what writes.
      requests: in the order of their indices.
      timing: what is spent is added to it.
      slots: how many are written side by side.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, request in enumerate(requests):
        key = (request.max_new_tokens, request.seed, *[repr(getattr(request, name)) for name in FIELDS])
        alike.setdefault(key, []).append(index)
    for indices in alike.values():
        for at in range(0, len(indices), slots):
            part = indices[at : at + slots]
            began = time.perf_counter()
            found = _written(method, model, [requests[i] for i in part], slots)
            timing.decode_seconds += time.perf_counter() - began
            records = [(i, _record(requests[i], own)) for i, own in zip(part, found, strict=True)]
            tokens, steps = (sum(getattr(own, name) for _, own in records) for name in ("new_tokens", "steps"))
            timing.new_tokens, timing.steps = timing.new_tokens + tokens, timing.steps + steps
            yield Turn(records, tokens, steps, max(own.steps for _, own in records))


def _written(method, model, requests, slots) -> list[Written]:
    first = requests[0]
    sampling = {
        name: getattr(first, name) for name, field in FIELDS.items() if _differs(getattr(first, name), field.default)
    }
    sampling["temperature"] = first.temperature
    prompts = [request.prompt for request in requests]
    return method(model, prompts, max_new_tokens=first.max_new_tokens, seed=first.seed, batch_size=slots, **sampling)


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
        error="the model's logits were not finite (NaN or infinite)" if failed else None,
        sample=request.sample,
        score=own.score,
    )
