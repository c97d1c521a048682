"""Completes the requests of a job with an engine in this process. `specjax.jobs.fleet` uses the workers of a
cluster."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np

from specjax.decoder import Needs
from specjax.jobs.learn import LearningEngine
from specjax.jobs.options import JobOptions
from specjax.jobs.output import Item
from specjax.serve.engine import Engine, Timing
from specjax.serve.request import Request, needs_of, several
from specjax.serve.selecting import Chooser, selected
from specjax.serve.slots import Turn
from specjax.serve.watch import OnText
from specjax.speculative import Speculative
from specjax.terminal import bad_input

RECENT = 1024
"""Requests that stay in memory after they were asked for: more than a batch has rows."""
TOGETHER = 256
"""Requests that are sorted by domain: a record waits for those before it, and a killed job loses records that wait."""


class Completer(Protocol):
    """The interface by which a job completes its requests.

    Attributes:
      timing: the time spent so far.
      tokenizer: the model's, to show ids as text; None if there is none.
      decoding: the way: `plain`, a drafter's name, `searched`, `soft`, or `masked` for a diffusion model.
      prefix: ids with which all prompts begin; they are prefilled once.
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
        """Completes the requests of these items; a turn's records have the indices of their items."""
        ...


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes for which a job's programs are compiled, and the properties that its rows share.

    Attributes:
      slots: rows of the batch.
      capacity: text buffer slots of a row.
      prefix: ids with which all prompts begin, to be prefilled once; empty for none.
      needs: the needs of all requests.
    """

    slots: int
    capacity: int
    prefix: tuple[int, ...]
    needs: Needs


class Asked(Sequence[Request]):
    """The requests of some items with all their completions. An item is read when its request is asked for.

    Args:
      items: of a job.
      left: the indices of items that are requests.
      count: completions of each.
    """

    def __init__(self, items: Sequence[Item], left: Sequence[int], count: int):
        self._items, self._left, self._count = items, left, count
        self._recent: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._left) * self._count

    def __getitem__(self, index: Any) -> Any:
        if index not in self._recent:
            if len(self._recent) >= RECENT:
                del self._recent[next(iter(self._recent))]
            place, own = divmod(range(len(self))[index], self._count)
            self._recent[index] = several(self._items[self._left[place]], self._count)[own]
        return self._recent[index]

    def __iter__(self) -> Iterator[Any]:
        return (one for index in self._left for one in several(self._items[index], self._count))


@dataclasses.dataclass(frozen=True)
class Whole:
    """All requests of a job, including those already done.

    So the noise, the shapes and the text of the remaining requests are those of an uninterrupted job.

    Attributes:
      items: of the job.
      places: `[I]`, by the index of an item, its place among the requests if it is one.
      keys: key data, `[R, 2]` in the order of the requests; completions of a request are adjacent.
      shapes: the shapes for all of them.
      count: completions of each request; a selection takes one.
    """

    items: Sequence[Item]
    places: np.ndarray
    keys: np.ndarray
    shapes: Shapes
    count: int = 1

    @classmethod
    def of(cls, options: JobOptions, engine: Engine, items: Sequence[Item]) -> "Whole":
        """Makes it from the items of a job, at least one of them a request.

        Raises:
          ValueError: if the model cannot share a prefix.
        """
        asked = np.fromiter((isinstance(item, Request) for item in items), bool, len(items))
        count = 1 if options.select is None else options.num_return_sequences
        every = Asked(items, np.flatnonzero(asked).tolist(), count)
        prefix = engine.shared_prefix(every) if options.shared_prefix else ()
        shapes = Shapes(engine.slots(every, options.batch_size), engine.capacity(every), prefix, needs_of(every))
        return cls(items, np.cumsum(asked) - 1, engine.keys(every), shapes, count)

    def part(self, left: Sequence[int]) -> tuple[Sequence[Request], np.ndarray]:
        """The requests of these items with all their completions, and their keys."""
        first = self.places[np.asarray(left, int)] * self.count
        return Asked(self.items, left, self.count), self.keys[(first[:, None] + np.arange(self.count)).ravel()]


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
        """See `Completer.turns`. Where drafts learn by domain, one domain's requests of `TOGETHER` come after another's."""
        if not isinstance(self.engine, LearningEngine):
            yield from self._turns(left, on_text)
            return
        together = TOGETHER if len(self.engine.domains) > 1 else max(len(left), 1)
        for begin in range(0, len(left), together):
            domains: dict[str | None, list[int]] = {}
            for place, item in enumerate(left[begin : begin + together], begin):
                domains.setdefault(cast(Request, self.whole.items[item]).domain, []).append(place)
            for domain, places in domains.items():
                self.engine.choose(domain)
                said = None if on_text is None else lambda at, text, places=places: on_text(places[at], text)
                yield from self._turns([left[place] for place in places], said)

    def _turns(self, left: Sequence[int], on_text: OnText | None) -> Iterator[Turn]:
        requests, keys = self.whole.part(left)
        make = _of_steps if self.engine.writes_steps else turns_of
        turns = make(self.engine, self.options, self.whole.shapes, requests, keys, on_text)
        chooser = Chooser.of(self.options.select, self.options.num_return_sequences)
        if chooser is not None:
            turns = selected(turns, requests, chooser.shown(self.options.logprobs))
        for turn in turns:
            yield dataclasses.replace(turn, finished=[(left[at], record) for at, record in turn.finished])


def turns_of(
    engine: Engine,
    options: JobOptions,
    shapes: Shapes,
    requests: Sequence[Request],
    keys: np.ndarray,
    on_text: OnText | None = None,
) -> Iterator[Turn]:
    """The engine's turns over a part of a job's requests, with the shapes of the whole job."""
    return engine.turns(
        requests,
        slots=shapes.slots,
        on_text=on_text,
        capacity=shapes.capacity,
        keys=keys,
        prefix=shapes.prefix,
        needs=shapes.needs,
        prompt_logprobs=options.prompt_logprobs,
        race=(chooser := Chooser.of(options.select, options.num_return_sequences)) is not None and chooser.races,
    )


def _of_steps(
    engine: Engine,
    options: JobOptions,
    shapes: Shapes,
    requests: Sequence[Request],
    keys: np.ndarray,
    on_text: OnText | None,
) -> Iterator[Turn]:
    """`turns_of` for a stepwise method, which yields texts at their end and reports unusable requests when it reaches
    them."""
    with bad_input():
        for turn in turns_of(engine, options, shapes, requests, keys):
            for index, record in turn.finished:
                if on_text is not None and record.text:
                    on_text(index, record.text)
            yield turn


def decoding_of(engine: Engine) -> str:
    """See `Completer.decoding`."""
    if engine.model.masked:
        return "masked"
    if engine.searches or engine.writes_steps or not isinstance(engine.decoder, Speculative):
        return "searched"
    if engine.thinks:
        return "soft"
    return engine.drafter if engine.decoder.drafter.depth else "plain"
