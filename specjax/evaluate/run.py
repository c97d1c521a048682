"""Decoders answer the same questions side by side.

Everything is compiled first. Then the questions are asked in parts, and one decoder after the other answers each part
(A B C, A B C, ...). So other load on the machine affects all decoders equally.

The clock runs from token ids to finished records and includes prefill. It excludes compiling, tokenising prompts and
checking answers.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.evaluate.decoders import Decoder, decoders_of
from specjax.evaluate.divergence import Text, check, divergences
from specjax.evaluate.evaluation import Evaluation
from specjax.evaluate.options import EvalOptions
from specjax.evaluate.questions import Item, items_of
from specjax.evaluate.results import Answer, Comparison, Cost, Row, compared, read_answers, row_of
from specjax.evaluate.trust import Size, Trust, trust_of
from specjax.plan.held import chip_bytes
from specjax.serve.call import joined
from specjax.serve.options import check_least
from specjax.serve.record_bar import record_bar
from specjax.serve.request import Record, Request, several
from specjax.serve.selecting import Choose, selected
from specjax.serve.slots import in_order
from specjax.sharding.rules import parts
from specjax.speculative import prefill_columns, prefill_width
from specjax.terminal import flag

_LOG = logging.getLogger(__name__)
PARTS = 8
"""The most parts, and the fewest batches of each."""

SEVERAL = ("families", "compare", "stop", "sampling")
"""Options that hold several texts."""

OnAnswers = Callable[[Sequence[Answer]], None]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A decoder and everything that it is asked.

    Attributes:
      decoder: the decoder.
      requests: one for every question and sample or, with a selection, for every completion.
      keys: the keys of their noise.
      capacity: text buffer slots of a row.
      batch_size: rows.
    """

    decoder: Decoder
    requests: list[Request]
    keys: np.ndarray
    capacity: int
    batch_size: int

    @property
    def asked(self) -> list[Request]:
        """A request for every answer."""
        return self.requests[:: self.completions]

    @property
    def completions(self) -> int:
        """How many completions are written for an answer."""
        return 1 if self.decoder.chooser is None else self.decoder.chooser.count

    def size(self, slots: int) -> Size:
        """What the model takes on a device, with the cache of one text of so many tokens."""
        engine = self.decoder.engine
        params, target = engine.params["target"], engine.decoder.target
        dtype = jax.tree.leaves(params)[0].dtype
        return Size(chip_bytes(params), chip_bytes(jax.eval_shape(lambda: target.init_cache(1, slots, dtype))), slots)

    def warm(self) -> None:
        """Compiles, by decoding one token for a request of each prefill size."""
        engine = self.decoder.engine
        served, split = engine.served(), parts(engine.mesh, "tokens")
        sizes: dict[tuple[int, int], int] = {}
        for index, request in enumerate(self.requests):
            length = len(served.given(request))
            width = prefill_width(length, split)
            sizes.setdefault((width, prefill_columns(length, width, self.capacity)), index)
        every = list(sizes.values())
        every += [index + 1 for index in every[:1] if self.requests[index].sample == 0]  # a copy of a prefilled row
        chosen = [self.requests[index] for index in sorted(every)]
        short = [one if one.suffix_ids else dataclasses.replace(one, max_new_tokens=1) for one in chosen]
        self._records(short, self.keys[sorted(every)], lambda count: None, None)

    def lap(self, part: range, advance: Callable[[int], None]) -> tuple[list[Record], Cost]:
        """Answers a part of the questions; returns a record per answer, and the cost of everything written.

        Args:
          part: the answers' indices.
          advance: called with the number of answers done.
        """
        engine, chooser, written = self.decoder.engine, self.decoder.chooser, []

        def choose(records: Sequence[Record]) -> Record:
            assert chooser is not None
            written.extend(records)
            return dataclasses.replace(chooser.shown(True)(records), steps=sum(record.steps for record in records))

        part = range(part.start * self.completions, part.stop * self.completions)
        requests, keys = [self.requests[i] for i in part], self.keys[list(part)]
        decoded, began = engine.timing.decode_seconds, time.perf_counter()
        records = self._records(requests, keys, advance, None if chooser is None else choose)
        seconds = time.perf_counter() - began
        tokens = sum(round(record.tokens_per_step * record.steps) for record in written or records)
        steps = sum(record.steps for record in records)
        return records, Cost(tokens, steps, seconds, engine.timing.decode_seconds - decoded)

    def _records(
        self, requests: list[Request], keys: np.ndarray, advance: Callable[[int], None], choose: Choose | None
    ) -> list[Record]:
        chooser = self.decoder.chooser
        turns = self.decoder.engine.turns(
            requests,
            slots=self.batch_size,
            keys=keys,
            capacity=self.capacity,
            race=choose is not None and chooser is not None and chooser.races,
        )
        if choose is not None:
            turns = selected(turns, requests, choose)

        def counted():
            for turn in turns:
                advance(len(turn.finished))
                yield turn

        return list(in_order(counted()))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything that an evaluation needs, checked.

    Attributes:
      options: as given.
      items: the questions.
      contestants: the decoders with their requests.
      before: answers of another run to compare with, or None.
    """

    options: EvalOptions
    items: list[Item]
    contestants: list[Contestant]
    before: list[Answer] | None

    @property
    def about(self) -> str:
        """The setting in words."""
        own, model = self.options, self.contestants[0].decoder.engine.model
        which = f"level {own.level}, seed {own.seed}" if own.questions is None else f"{own.questions!s:.60}"
        asked = f"{len(self.items)} questions" + (f" x {own.samples} samples" if own.samples > 1 else "")
        drawn = f"temperature {own.temperature:g}, seed {own.seed}" if own.temperature else "greedy"
        return f"{model.name}, {model.dtype_name}, {asked} ({which}), {drawn}, batch {own.batch_size}"


def prepare(options: EvalOptions) -> Prepared:
    """Prepares questions, engines and requests.

    Raises:
      ValueError: before any work, with one line about what cannot be used.
    """
    check_least(options)
    if not 0 <= options.margin <= 100:
        raise ValueError(f"margin must be in [0, 100] points, got {options.margin}")
    items = items_of(options)
    asked = [(item.id, sample, item.prompt) for item in items for sample in range(options.samples)]
    before = None if options.baseline is None else read_answers(options.baseline, asked)
    contestants = [_contestant(options, decoder, items) for decoder in decoders_of(options)]
    if options.trust:
        _check_trust(contestants)
    lines = [each.decoder.engine.left_out(each.decoder.of_prompts, each.requests) for each in contestants]
    for line in dict.fromkeys(filter(None, lines)):
        _LOG.warning(line)
    return Prepared(options, items, contestants, before)


def _check_trust(contestants: Sequence[Contestant]) -> None:
    """Raises ValueError if there is nothing to compare, or if models cannot be compared token by token."""
    if len(contestants) < 2:
        raise ValueError(
            "trust is of compared models: give the whole model first and each shrunk one as compare, such as "
            "compare 'weights=int8'"
        )
    names = [each.decoder.name for each in contestants]
    check([each.decoder.engine for each in contestants], names)
    first = contestants[0]
    for other in contestants[1:]:
        if any(a.ids != b.ids for a, b in zip(first.asked, other.asked, strict=True)):
            raise ValueError(
                f"{other.decoder.name} reads a question as other tokens than {names[0]}: divergence is between models of "
                "one tokenizer, so leave trust out, or this model"
            )


def _contestant(options: EvalOptions, decoder: Decoder, items: list[Item]) -> Contestant:
    engine = decoder.engine
    if engine.model.tokenizer is None:
        raise ValueError(f"{engine.model.name} has no tokenizer, and answers are texts")
    engine.check_stop(decoder.of_prompts.get("stop", ()))
    requests: list[Any] = []
    for item in items:
        try:
            request = _request(decoder, item, options.infill)
        except ValueError as error:
            hint = "; leave its family or level out" if options.questions is None else ""
            raise ValueError(f"question {item.id!r} for {decoder.name}: {error}{hint}") from error
        requests += several(request, options.samples if decoder.chooser is None else decoder.chooser.count)
    if decoder.chooser is not None:
        decoder.chooser.check(engine, requests)
    return Contestant(decoder, requests, engine.keys(requests), engine.capacity(requests), options.batch_size)


def _request(decoder: Decoder, item: Item, infill: bool) -> Request:
    engine = decoder.engine
    options: dict[str, Any] = joined(decoder.of_prompts, {"id": item.id, **item.options})
    if decoder.options.task_constraint:
        if item.constraint is None or options.get("constraint"):
            why = "it has a constraint already" if options.get("constraint") else "it asks for no form"
            raise ValueError(f"{why}, so {flag('task_constraint')} is not for it")
        options["constraint"] = item.constraint
    if not infill or item.gap is None:
        return engine.request(item.prompt, suffix=item.suffix, **options)
    left, answer, right = item.gap
    room = len(engine.model.tokenizer.encode(f" {answer}", add_special_tokens=False, verbose=False))
    options["max_new_tokens"] = room
    return engine.request(left, suffix=f" {right}", **options)


def run(prepared: Prepared, shown: bool = False, on_answers: OnAnswers | None = None) -> Evaluation:
    """Asks every decoder every question.

    Args:
      prepared: from `prepare`.
      shown: whether to show a bar on stderr.
      on_answers: called with the answers of every finished part.
    """
    contestants, samples = prepared.contestants, prepared.options.samples
    count = len(prepared.items) * samples
    answers: list[list[Answer]] = [[] for _ in contestants]
    costs: list[list[Cost]] = [[] for _ in contestants]
    texts: list[Sequence[int]] = []
    laps = len(contestants) + prepared.options.trust
    with record_bar(count * laps) if shown else contextlib.nullcontext(lambda *_: None) as advance:
        for contestant in contestants:
            advance(0, f"compiling {contestant.decoder.name}")
            contestant.warm()
        for part in cut(count, prepared.options.batch_size):
            for index, contestant in enumerate(contestants):
                records, cost = contestant.lap(part, _teller(advance, contestant, answers[index]))
                asked = [prepared.items[i // samples] for i in part]
                new = [_answer(contestant.decoder.name, *pair) for pair in zip(asked, records, strict=True)]
                answers[index] += new
                costs[index].append(cost)
                texts += [record.tokens for record in records] if index == 0 else []
                if on_answers is not None:
                    on_answers(new)
        rows = [
            row_of(contestant.decoder.name, own, _sum(spent))
            for contestant, own, spent in zip(contestants, answers, costs, strict=True)
        ]
        told = lambda count: advance(count, "divergence by token")
        trust = _trust(prepared, rows, texts, told) if prepared.options.trust else []
    return Evaluation(rows, list(_comparisons(prepared, rows)), prepared.about, trust)


def _trust(
    prepared: Prepared, rows: Sequence[Row], texts: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> list[Trust]:
    """A row of trust for every decoder, along the first one's texts."""
    first = prepared.contestants[0]
    capacity = max(each.capacity for each in prepared.contestants)
    sums = divergences(
        [each.decoder.engine for each in prepared.contestants],
        [Text(request, tokens) for request, tokens in zip(first.asked, texts, strict=True)],
        keys=first.keys[:: first.completions],
        capacity=capacity,
        batch_size=first.batch_size,
        advance=advance,
    )
    sizes = [each.size(capacity) for each in prepared.contestants]
    return trust_of(rows, [item.asks for item in prepared.items], sums, sizes)


def _teller(advance: Any, contestant: Contestant, answers: Sequence[Answer]) -> Callable[[int], None]:
    right = sum(answer.right for answer in answers)
    words = contestant.decoder.name + (f", {100 * right / len(answers):.0f}% right so far" if answers else "")
    return lambda count: advance(count, words)


def cut(count: int, batch_size: int) -> Iterator[range]:
    """Ranges of nearly equal size over requests `0 .. count - 1`; a question's answers may fall into two of them.

    >>> [len(part) for part in cut(200, 8)], [len(part) for part in cut(1000, 8)][:2]
    ([66, 67, 67], [125, 125])
    """
    many = min(max(count // (PARTS * batch_size), 1), PARTS)
    for index in range(many):
        yield range(index * count // many, (index + 1) * count // many)


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(*(sum(values) for values in zip(*map(dataclasses.astuple, costs), strict=True)))


def _answer(name: str, item: Item, record: Record) -> Answer:
    text = record.text or ""
    return Answer(
        name,
        item.id,
        item.family,
        item.prompt,
        text,
        record.error is None and item.right(text),
        record.new_tokens,
        record.steps,
        record.finish_reason,
        record.sample or 0,
        record.nll,
        item.obeys(text),
    )


def _comparisons(prepared: Prepared, rows: Sequence[Row]) -> Iterator[Comparison]:
    margin, first = prepared.options.margin, rows[0]
    if prepared.before is not None:
        for row in rows:
            name = f"{prepared.before[0].decoder} of {prepared.options.baseline}"
            yield compared(row.decoder, name, prepared.before, row.answers, None, margin)
        return
    for row in rows[1:]:
        speed = row.tokens_per_second / first.tokens_per_second
        yield compared(row.decoder, first.decoder, first.answers, row.answers, speed, margin)


def evaluate(model: Any = None, *, progress: bool = False, **options: Any) -> Evaluation:
    """Measures how often a model's answers are right, and how fast they come: `specjax eval` in Python.

    Args:
      model: what `specjax.models.load` returned, a folder, a shipped name or hub id, or None for the shipped target.
      progress: whether to show a bar on stderr.
      **options: the fields of `specjax.evaluate.options.EvalOptions`, except `answers`, `plot` and `json`, which only the
        command has.

    Raises:
      ValueError: before any work, with one line about what cannot be used.
      TypeError: on an unknown option.
    """
    options |= {name: (options[name],) for name in SEVERAL if isinstance(options.get(name), str)}
    return run(prepare(EvalOptions(model=model, **options)), progress)
