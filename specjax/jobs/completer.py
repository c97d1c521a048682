"""Who completes the requests of a job: an engine in this process. `specjax.jobs.fleet` has the workers of a cluster."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from specjax.decoder import Needs
from specjax.jobs.options import JobOptions
from specjax.jobs.output import Item
from specjax.serve.engine import Engine, Timing
from specjax.serve.request import Request, needs_of
from specjax.serve.slots import OnText, Turn


class Completer(Protocol):
    """What a job needs of whoever completes its requests.

    Attributes:
      timing: what was spent so far.
      tokenizer: of the model, to show ids as text; None where there is none.
      decoding: how: `plain`, `drafted`, or `masked` for a diffusion model.
      prefix: ids that all prompts begin with and that are prefilled once.
    """

    @property
    def timing(self) -> Timing: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def decoding(self) -> str: ...

    @property
    def prefix(self) -> tuple[int, ...]: ...

    def turns(self, left: Sequence[int], on_text: OnText | None) -> Iterator[Turn]:
        """Completes the requests of these items; what a turn finished has the index of its item."""
        ...


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What the programs of a job are compiled for, and what its rows have in common.

    Attributes:
      slots: rows of the batch.
      capacity: text buffer slots of a row.
      prefix: ids that all prompts begin with, to be prefilled once; empty for none.
      needs: of all requests.
    """

    slots: int
    capacity: int
    prefix: tuple[int, ...]
    needs: Needs


@dataclasses.dataclass(frozen=True)
class Whole:
    """All requests of a job, whatever is done of it. Noise, shapes and so the text of what is left are those of a job that was
    never interrupted.

    Attributes:
      requests: by the index of their item.
      keys: key data `[R, 2]`, in the same order.
      shapes: of all of them.
    """

    requests: dict[int, Request]
    keys: np.ndarray
    shapes: Shapes

    @classmethod
    def of(cls, options: JobOptions, engine: Engine, items: Sequence[Item]) -> "Whole":
        """Of the items of a job, at least one of them a request.

        Raises:
          ValueError: where the model cannot share a prefix.
        """
        requests = {index: item for index, item in enumerate(items) if isinstance(item, Request)}
        every = list(requests.values())
        prefix = engine.shared_prefix(every) if options.shared_prefix else ()
        shapes = Shapes(min(options.batch_size, len(every)), engine.capacity(every), prefix, needs_of(every))
        return cls(requests, engine.keys(every), shapes)

    def part(self, left: Sequence[int]) -> tuple[list[Request], np.ndarray]:
        """The requests of these items, and their keys."""
        at = {index: place for place, index in enumerate(self.requests)}
        return [self.requests[index] for index in left], self.keys[[at[index] for index in left]]


@dataclasses.dataclass(frozen=True)
class OnEngine:
    """A `Completer` over an engine."""

    engine: Engine
    options: JobOptions
    whole: Whole

    @property
    def timing(self) -> Timing:
        return self.engine.timing

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    @property
    def decoding(self) -> str:
        return decoding_of(self.engine)

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.whole.shapes.prefix

    def turns(self, left: Sequence[int], on_text: OnText | None) -> Iterator[Turn]:
        """See `Completer.turns`."""
        requests, keys = self.whole.part(left)
        for turn in turns_of(self.engine, self.options, self.whole.shapes, requests, keys, on_text):
            yield dataclasses.replace(turn, finished=[(left[at], record) for at, record in turn.finished])


def turns_of(
    engine: Engine,
    options: JobOptions,
    shapes: Shapes,
    requests: Sequence[Request],
    keys: np.ndarray,
    on_text: OnText | None = None,
) -> Iterator[Turn]:
    """The engine's turns over a part of a job's requests, in the shapes of the whole."""
    return engine.turns(
        requests,
        slots=shapes.slots,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        on_text=on_text,
        capacity=shapes.capacity,
        keys=keys,
        prefix=shapes.prefix,
        needs=shapes.needs,
        prompt_logprobs=options.prompt_logprobs,
    )


def decoding_of(engine: Engine) -> str:
    """See `Completer.decoding`."""
    if engine.model.masked:
        return "masked"
    return "drafted" if engine.decoder.drafter.depth else "plain"
