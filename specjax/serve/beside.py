"""Requests that come while a job runs, in the job's own rows.

They go first: on-line before off-line, as in xLLM's scheduler (jd-opensource/xllm, `continuous_scheduler.cpp`; two pools:
arXiv:2511.21862). There a row of the job that makes room loses its caches, and is read again later. Here its whole state
waits in the host's memory, so that nothing is read twice and its text stays what it was to be.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import jax
import numpy as np

from specjax import decoder as decoding
from specjax.models.text import Chat
from specjax.sampling.noise import keys_of
from specjax.sampling_params import form_of
from specjax.serve.call import Call
from specjax.serve.engine import Engine
from specjax.serve.prefix_cache import Reader as PrefixReader
from specjax.serve.request import Record, Request, needed_by, needs_of
from specjax.serve.sampling import Sampling
from specjax.serve.slots import Loop, Slots, Turn
from specjax.serve.watch import Watch
from specjax.sharding.distributed import to_host

Asked = tuple[Request, "Future[Record]", Callable[[str], None] | None]


@dataclasses.dataclass(frozen=True)
class Paused:
    """A row of the job that made room.

    Attributes:
      held: the index of its request.
      row: its state, on the host, with its key as data.
      length: the tokens that turns have reported.
      steps: the passes that turns have reported.
    """

    held: list[int]
    row: Any
    length: int
    steps: int


class Rows(Loop):
    """The rows of a job, into which others come.

    Attributes:
      come: the requests that have come since the last call, by their numbers; told whether all others have ended.
      job: how many requests the job has; the others' numbers follow.
      urgent: the numbers of requests that came and have no row yet.
      paused: rows that made room, in the order in which they go on.
    """

    def __init__(self, come: Callable[[bool], list[tuple[int, Request, np.ndarray]]], *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.come, self.job = come, len(self.requests)
        self.urgent: collections.deque[int] = collections.deque()
        self.paused: collections.deque[Paused] = collections.deque()

    def turns(self) -> Iterator[Turn]:
        """See `Loop.turns`."""
        self.begin()
        while self._more():
            self.enter()
            yield self.harvest(self.step())

    def _more(self) -> bool:
        """Whether there is work left, after those that have come were heard."""
        idle = not (self.waiting or self.held or self.paused or self.urgent)
        if new := self.come(idle):
            numbers, requests, keys = zip(*new, strict=True)
            assert numbers[0] == len(self.requests)
            self.requests = [*self.requests, *requests]
            self.keys = np.concatenate([self.keys, *keys])
            self.urgent.extend(numbers)
        return bool(new) or not idle

    def enter(self) -> None:
        """Those that came get rows first, then rows that made room go on, then the job's next requests enter."""
        short = len(self.urgent) - (self.slots.rows - len(self.held))
        if short > 0:
            self._pause(short)
        free = [row for row in range(self.slots.rows) if row not in self.held]
        self._go_on(free[: max(0, len(free) - len(self.urgent))])
        self.waiting.extendleft([number] for number in reversed(self.urgent))
        self.urgent.clear()
        super().enter()
        while self.waiting and self.waiting[0][0] >= self.job:  # more came than there are rows
            self.urgent.append(self.waiting.popleft()[0])

    def _pause(self, count: int) -> None:
        """Moves rows of the job to the host, those first whose requests come last."""
        rows = [row for row, own in self.held.items() if own[0] < self.job]
        rows = sorted(rows, key=lambda row: -self.held[row][0])[:count]
        with self.timing.spent("prefill_seconds"):
            for row in rows:
                own = decoding.row_of(self.slots.served.decoder, self.state, jax.device_put(np.int32(row)))
                own = to_host(dataclasses.replace(own, key=jax.random.key_data(own.key)))
                self.paused.appendleft(Paused(self.held.pop(row), own, self.length[row], self.steps[row]))

    def _go_on(self, rows: Sequence[int]) -> None:
        """Puts rows that made room back, as many as there are."""
        with self.timing.spent("prefill_seconds"):
            for row in rows[: len(self.paused)]:
                own = self.paused.popleft()
                at, state = jax.device_put((np.int32(row), own.row))
                self.state = decoding.copy_row(self.slots.served.decoder, self.state, at, state, keys_of(state.key[0]))
                self.held[row], self.length[row], self.steps[row] = own.held, own.length, own.steps


class Beside:
    """A job whose rows also serve requests that come while it runs, before its own.

    Every text is that of the same request alone. A request that comes gets a row at the next call on the device, which makes
    at most 8 steps, or when such a request's row is free again. If none is free, the row of the job's last request waits on
    the host. Rows that end are told to the engine (`Engine.finished`), of whichever request they are.

    Args:
      engine: of both.
      requests: the job's, from `Engine.request`.
      longest: the most tokens that a request that comes has, with its new ones; at most what the model has room for.
      sampling: the options that such requests may set; None: the usual ones.
      batch_size: rows decoded together.

    Raises:
      ValueError: without requests or rows, for a length that the model lacks, for a search or a stepwise method, for a
        model with an encoder, for several meshes, in several processes.

    >>> from specjax import Engine
    >>> engine = Engine("tiny")
    >>> both = Beside(engine, [engine.request("[ hen, dog,", max_new_tokens=16) for _ in range(9)], longest=64)
    >>> answer = both.ask("[ red, blue,", max_new_tokens=8)
    >>> sum(len(turn.finished) for turn in both.turns()), answer.done()
    (9, True)
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        longest: int,
        sampling: Sampling | None = None,
        batch_size: int = 8,
    ):
        apart = not isinstance(engine.served().reader, PrefixReader | None)
        if engine.searches or engine.writes_steps or engine.encodes or engine.decoder.hosted or apart:
            raise ValueError(
                f"rows of {engine!r} cannot wait on the host: decode a model without an encoder on one mesh, with a drafter or "
                "an unmasking rule"
            )
        if batch_size < 1 or not 2 <= longest <= engine.max_length:
            raise ValueError(
                f"Beside needs a row at least, and longest from 2 to the {engine.max_length} tokens of {engine.model.name}; "
                f"got batch_size={batch_size}, longest={longest}"
            )
        if jax.process_count() > 1:
            raise ValueError("requests that come are heard by one process, and these are several: run it in one")
        if not requests:
            raise ValueError("a job needs at least one request; without a job, Engine.generate answers those that come")
        options: dict[str, Any] = {"temperature": 1.0} if sampling is None else dict(sampling.given)
        options["max_new_tokens"] = longest - 1
        like = engine.request([0], **options)
        self.engine = engine
        self.needs = dataclasses.replace(needs_of([*requests, like]), brief=False)
        self.capacity = engine.capacity([*requests, like])
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._futures: dict[int, Future[Record]] = {}
        self._shown: dict[int, Callable[[str], None]] = {}
        self._failed: dict[int, Exception] = {}
        self._lock, self._begun, self._ended = threading.Lock(), False, False
        slots = Slots(engine.served(), batch_size, self.capacity, self.needs.form)
        watch = Watch(engine.model.tokenizer, self._show)
        self._rows = Rows(
            self._come, slots, requests, engine.keys(requests), self.needs, timing=engine.timing, watch=watch,
            on_end=engine._ended,
        )  # fmt: skip

    def ask(
        self,
        prompt: Any,
        *,
        sampling: Sampling | None = None,
        chat: bool | Chat = False,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> "Future[Record]":
        """Asks for the completion of a prompt, from any thread, before or while the turns are read.

        Args:
          prompt: see `specjax.generate`; one.
          sampling: see `specjax.generate`.
          chat: see `specjax.generate`.
          on_text: called with the new text every few steps, where the turns are read. What it raises is the answer's
            exception, and it is not called again.
          **options: options of `Sampling`; they take precedence.

        Returns:
          Its record, which comes while the turns are read.

        Raises:
          ValueError: for a prompt or options that cannot be used, that are longer than `longest`, or for which the rows
            have no column, and for `on_text` without a tokenizer.
          RuntimeError: if the job has ended.
        """
        requests = Call.of(prompt, sampling=sampling, chat=chat, options=options).requests(self.engine)
        if len(requests) != 1:
            raise ValueError(f"ask takes one prompt, and these are {len(requests)}: ask for each")
        if on_text is not None and self.engine.model.tokenizer is None:
            raise ValueError(
                f"{self.engine.model.name} has no tokenizer, so there is no text to show: leave on_text out"
            )
        request, room = requests[0], dict(self.needs.form)
        need = needed_by(request, self.engine.max_length, self.engine.decoder.slack)
        if need > self.capacity:
            raise ValueError(
                f"this request needs {need} slots and the rows have {self.capacity}: give a larger longest, or ask for less"
            )
        wide = lambda name, widths: all(a <= b for a, b in zip(widths, room[name], strict=True))
        lacking = [name for name, widths in form_of([request]) if name not in room or not wide(name, widths)]
        if lacking or self.needs.greedy and not needs_of([request]).greedy:
            name = (lacking or ["temperature"])[0]
            raise ValueError(
                f"the rows have no column for {name}, or a narrower one: give sampling= that has it, as long as it may be"
            )
        answer: Future[Record] = Future()
        with self._lock:
            if self._ended:
                raise RuntimeError("the job has ended: Engine.generate answers what comes after it")
            self._asked.put((request, answer, on_text))
        return answer

    def turns(self) -> Iterator[Turn]:
        """The turns of the job, with its own records, to be read once. They end when nothing is left; what was asked for is
        then answered. If they are not read to their end, it is given up with a RuntimeError.

        Raises:
          RuntimeError: if they were read before.
        """
        if self._begun:
            raise RuntimeError("the turns were read before: make another Beside for what is left")
        self._begun, rows = True, self._rows
        try:
            for turn in rows.turns():
                for number, record in turn.finished:
                    if number >= rows.job:
                        self._shown.pop(number, None)
                        answer, error = self._futures.pop(number), self._failed.pop(number, None)
                        answer.set_result(record) if error is None else answer.set_exception(error)
                yield dataclasses.replace(turn, finished=[own for own in turn.finished if own[0] < rows.job])
        finally:
            with self._lock:
                self._ended = True
            while not self._asked.empty():
                self._futures[-len(self._futures) - 1] = self._asked.get()[1]
            for answer in self._futures.values():
                with contextlib.suppress(InvalidStateError):  # cancelled
                    answer.set_exception(RuntimeError("the job has ended before this was answered"))

    def _come(self, idle: bool) -> list[tuple[int, Request, np.ndarray]]:
        """See `Rows.come`. Once all have ended, nothing more is taken."""
        new = []
        with self._lock:
            while not self._asked.empty():
                request, answer, on_text = self._asked.get()
                if not answer.set_running_or_notify_cancel():
                    continue
                number = len(self._rows.requests) + len(new)
                self._futures[number] = answer
                if on_text is not None:
                    self._shown[number] = on_text
                new.append((number, request, self.engine.keys([request])))
            self._ended = self._ended or idle and not new
        return new

    def _show(self, number: int, text: str) -> None:
        if (on_text := self._shown.get(number)) is not None:
            try:
                on_text(text)
            except Exception as error:  # one listener's fault ends no other text
                self._failed[number] = error
                del self._shown[number]
