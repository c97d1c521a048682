"""The rows of a batch, refilled as their requests end: the loop of `Engine.run` and of jobs.

In the shape descriptions `B` denotes rows (slots), `R` inserted rows, `P` prompt columns.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from specjax import decoder as decoding
from specjax.decoder import Decoder, Needs
from specjax.lm import Source
from specjax.prompts import Prompts
from specjax.sampling.noise import keys_of
from specjax.sampling_params import USUAL, Form, SamplingArrays, is_set
from specjax.serve.race import Race
from specjax.serve.request import Record, Request, follows, rows_of
from specjax.serve.text_reader import power_of_two
from specjax.serve.watch import End, Watch, new_tokens, text_of
from specjax.sharding.distributed import to_devices, to_host
from specjax.sharding.rules import parts, rounded
from specjax.speculative import prefill_columns, prefill_width
from specjax.state import Finish
from specjax.warpers import WARPERS

STEPS_PER_CALL = 32
WATCHED_STEPS = 8  # per call, if text is watched as it comes
REFILL_SHARE = 16  # a call ends when one row in 16 is free, so that hundreds of rows do not end a call in each step
SHORTEST_SOURCE = 16  # columns
_PROGRESS = ("prompt_length", "length", "finish", "stats")  # fields of a state that say how far rows are
_TEXTS = ("tokens", "logprobs", "found")  # and those that are as long as the buffers
REASONS = {Finish.EOS: "eos", Finish.LENGTH: "length", Finish.STOP: "stop", Finish.ERROR: "error"}

OnEnd = Callable[[Sequence[int], Any], Any]


@dataclasses.dataclass(frozen=True)
class Turn:
    """The result of one call on the device.

    Attributes:
      finished: the index and record of every request that ended.
      new_tokens: tokens committed by the call, summed over rows.
      steps: passes in which rows took part, summed over rows.
      passes: passes of the batch; `steps / (passes * B)` is the occupancy of the slots.
    """

    finished: list[tuple[int, Record]]
    new_tokens: int
    steps: int
    passes: int


def in_order(turns: Iterator[Turn]) -> Iterator[Record]:
    """The records of turns in the order of their requests; records that end early wait."""
    early: dict[int, Record] = {}
    due = 0
    for turn in turns:
        early.update(turn.finished)
        while due in early:
            yield early.pop(due)
            due += 1


@dataclasses.dataclass
class Timing:
    """The time spent, separately for decoding steps, compilation and prefill; and what was done in it.

    Attributes:
      decode_seconds: on steps.
      prefill_seconds: on reading prompts.
      compile_seconds: on compilation before the first prompt.
      new_tokens: of records.
      steps: target passes, summed over rows.
      prompt_tokens: with a prefix cache, the tokens of prompts that had to be known before their first step.
      known_tokens: those of them that the cache had.
    """

    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    new_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0

    @contextlib.contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Adds the duration of a `with` block to the seconds of this name."""
        began = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)

    @property
    def known(self) -> str:
        """What a prefix cache has saved, in words; empty without one."""
        if not self.prompt_tokens:
            return ""
        return f"{self.known_tokens} of {self.prompt_tokens} prompt tokens known"

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Served:
    """The part of an engine's model that rows need.

    Attributes:
      decoder: a `specjax.decoder.Decoder`.
      params: its parameters.
      max_length: the length of the longest text, prompt and output.
      tokenizer: a transformers tokenizer; None: records have ids and no text.
      eos: ids that end a text.
      mask_id: the id of an open position, for a model that fills in before a suffix.
      mesh: the mesh that holds the rows, or None.
      reader: reads prompts in another way: on another mesh (`specjax.serve.disaggregated.Reader`), or after what was read
        of earlier ones (`specjax.serve.prefix_cache.Reader`); None: each prompt is read as a whole, in these rows.
    """

    decoder: Decoder
    params: Any
    max_length: int
    tokenizer: Any = None
    eos: tuple[int, ...] = ()
    mask_id: int | None = None
    mesh: jax.sharding.Mesh | None = None
    reader: Any = None

    def given(self, request: Request) -> tuple[int, ...]:
        """The initial tokens of a row: the prompt or, with a suffix or gaps, the whole canvas."""
        if request.gaps:
            return (*request.ids, *request.gaps, *request.suffix_ids)
        if self.mask_id is None or not request.suffix_ids:
            return request.ids
        return (*request.ids, *[self.mask_id] * request.max_new_tokens, *request.suffix_ids)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Rows of one shape and how requests enter them.

    Attributes:
      served: the model.
      count: B.
      capacity: text buffer slots of a row.
      form: the columns of sampling parameters that rows have.
    """

    served: Served
    count: int
    capacity: int
    form: Form = USUAL

    @property
    def rows(self) -> int:
        """B, rounded to what the mesh divides."""
        return rounded(self.served.mesh, "batch", self.count)

    @property
    def share(self) -> int:
        """The number of rows that enter together."""
        return max(1, self.rows // REFILL_SHARE)

    def with_params(self, params: Any) -> "Slots":
        """The same rows for a model with other parameters."""
        return dataclasses.replace(self, served=dataclasses.replace(self.served, params=params))

    def empty(self) -> Any:
        """A state of free rows."""
        decoder, params = self.served.decoder, self.served.params
        dtype = jax.tree.leaves(params["target"])[0].dtype
        eos_width = max(len(self.served.eos), 1)
        return decoding.empty(decoder, params, self.rows, self.capacity, dtype, eos_width, form=self.form)

    def read_prefix(self, state: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
        """The state, and the prefix shared by prompts that begin with these tokens; None for no tokens."""
        if not tokens:
            return state, None
        ids = jax.device_put(np.asarray(tokens, np.int32))
        if self.served.reader is not None:
            return state, self.served.reader.read_prefix(self, ids)
        return decoding.read_prefix(self.served.decoder, self.served.params, state, ids)

    def insert(
        self, state: Any, rows: Sequence[int], requests: Sequence[Request], keys: np.ndarray, prefix: Any = None
    ) -> Any:
        """Inserts requests into rows, a few at a time. `prefix` is from `read_prefix`."""
        if self.served.reader is not None:
            return self.served.reader.insert(self, state, rows, requests, keys, prefix)
        for chosen, prompts in self.calls(rows, requests, keys, prefix):
            state = decoding.insert(self.served.decoder, self.served.params, state, chosen, prompts, prefix=prefix)
        return state

    def calls(
        self, rows: Sequence[int], requests: Sequence[Request], keys: np.ndarray, prefix: Any = None
    ) -> Iterator[tuple[np.ndarray, Prompts]]:
        """The rows and prompts of every call with which requests enter.

        There is one compiled shape per prefill width (for a prompt of several chunks, per power of two of them), and per
        width of sources. The content of a row does not depend on which other requests enter."""
        known = 0 if prefix is None else prefix.length - 1
        split = parts(self.served.mesh, "tokens")
        widths = [
            (prefill_width(len(self.served.given(request)) - known, split), self._source_width(request.source))
            for request in requests
        ]
        for width in sorted(set(widths)):
            chosen = [i for i, own in enumerate(widths) if own == width]
            for at in range(0, len(chosen), self.share):
                part = chosen[at : at + self.share]
                chosen_rows, asked = [rows[i] for i in part], [requests[i] for i in part]
                yield self._call(chosen_rows, asked, keys[part], *width, prefix)

    def _source_width(self, source: Any) -> int:
        """The columns of a request's source: its features', or for tokens one of a few numbers; 0 without a source."""
        if not isinstance(source, tuple):
            return 0 if source is None else len(source)
        return min(max(power_of_two(len(source)), SHORTEST_SOURCE), self.capacity)

    def enter(
        self, state: Any, rows: Sequence[int], requests: Sequence[Request], keys: np.ndarray, prefix: Any, kept: Any
    ) -> tuple[Any, Any]:
        """Like `insert`, but adjacent completions of a prompt share its prefill: the prompt is read for the first of
        them.

        Args:
          state: see `insert`.
          rows: see `insert`.
          requests: see `insert`.
          keys: see `insert`.
          prefix: see `insert`.
          kept: what the previous call returned, or None.

        Returns:
          The state, and the `kept` of the next call: the last prompt's first request, and its row before any step.
        """
        decoder = self.served.decoder
        if not decoder.reads_prefix or decoder.num_texts > 1:
            return self.insert(state, rows, requests, keys, prefix), None
        runs = rows_of(requests, len(requests) + 1)
        known = kept is not None and follows(kept[0], requests[0])
        read = [run[0] for run in runs[known:]]
        if read:
            state = self.insert(state, [rows[i] for i in read], [requests[i] for i in read], keys[read], prefix)
        for at, run in enumerate(runs):
            copies = run if at == 0 and known else run[1:]
            if copies is not run and requests[run[0]].sample is not None:
                kept = requests[run[0]], decoding.row_of(decoder, state, jax.device_put(np.int32(rows[run[0]])))
            for i in copies:
                row, key = jax.device_put((np.int32(rows[i]), keys[i]))
                state = decoding.copy_row(decoder, state, row, kept[1], keys_of(key))
        return state, kept

    def _call(self, rows, requests, keys, width, source_width, prefix):
        # unused places repeat the first request and are dropped
        spare = self.share - len(rows)
        rows, requests = [*rows, *[self.rows] * spare], [*requests, *requests[:1] * spare]
        keys = np.concatenate([keys, np.repeat(keys[:1], spare, axis=0)])
        begin = 1 if prefix is None else prefix.length
        longest = max(len(self.served.given(request)) for request in requests)
        size = prefill_columns(longest, width, self.capacity, begin)
        return np.asarray(rows), self.prompts(requests, keys, size, width, source_width)

    def prompts(
        self, requests: Sequence[Request], keys: np.ndarray, size: int, width: int, source_width: int = 0
    ) -> Prompts:
        """The input of an insert.

        Args:
          requests: R of them.
          keys: key data `[R, 2]`.
          size: P, at least the longest prompt's tokens.
          width: of a chunk of prefill.
          source_width: the columns of their sources; 0: they have none.
        """
        given = [self.served.given(request) for request in requests]
        tokens = np.zeros((len(requests), size), np.int32)
        for row, ids in enumerate(given):
            tokens[row, : len(ids)] = ids
        eos = np.asarray(self.served.eos or (-1,), np.int32)
        goes_on = np.asarray([request.ignore_eos for request in requests])
        ends = [len(r.ids) + r.max_new_tokens + len(r.suffix_ids) for r in requests]
        return Prompts(
            tokens,
            np.asarray([len(ids) for ids in given], np.int32),
            keys_of(jax.device_put(keys)),  # `jnp.asarray` would compile a program
            np.minimum(ends, self.served.max_length).astype(np.int32),
            SamplingArrays.of_rows(requests, self.form),
            np.where(goes_on[:, None], np.int32(-1), eos[None]),
            width,
            Source.of([request.source for request in requests], source_width) if source_width else None,
        )


class Loop:
    """Rows of a batch that are refilled as their requests end.

    The device runs on its own until a row ends or a number of steps is over. Between such calls, the host collects the
    records of rows that ended and puts the next requests into these rows.

    Attributes:
      state: the rows.
      waiting: requests without a row, in groups that share one.
      held: the indices of every occupied row's requests; more than one only in a search.
      length: `[B]`, the tokens of every row that turns have reported.
      steps: `[B]`, the passes that turns have reported.
      shared: the common prefix of all prompts, from `Slots.read_prefix`.
      kept: what `Slots.enter` last returned.
    """

    def __init__(
        self,
        slots: Slots,
        requests: Sequence[Request],
        keys: np.ndarray,
        needs: Needs,
        *,
        timing: Timing | None = None,
        prefix: Sequence[int] = (),
        watch: Watch | None = None,
        race: Race | None = None,
        on_end: OnEnd | None = None,
    ):
        """
        Args:
          slots: rows with enough room for every request.
          requests: at least one; they enter in this order.
          keys: key data `[R, 2]`, one per request.
          needs: the needs of these requests, or of a longer list that contains them.
          timing: receives the time spent.
          prefix: ids with which every prompt begins; they are prefilled once.
          watch: watches texts as they come.
          race: stops completions that are longer than a finished one of the same prompt, if only the shortest is
            wanted.
          on_end: called with the rows that have just ended and the state; returns the parameters for further steps.
        """
        self.slots, self.requests, self.keys, self.prefix = slots, requests, keys, prefix
        self.decoder = slots.served.decoder.fitted(needs)
        self.timing, self.watch, self.race, self.on_end = timing or Timing(), watch, race, on_end
        self.waiting = collections.deque(rows_of(requests, self.decoder.num_texts))
        self.held: dict[int, list[int]] = {}
        self.length, self.steps = np.zeros(slots.rows, np.int64), np.zeros(slots.rows, np.int64)
        self.state: Any = None
        self.shared: Any = None
        self.kept: Any = None

    def turns(self) -> Iterator[Turn]:
        """The result of each call on the device, until every request has ended."""
        self.begin()
        while self.waiting or self.held:
            self.enter()
            yield self.harvest(self.step())

    def begin(self) -> None:
        """Compiles, so that timing covers only decoding, and reads the prefix."""
        with self.timing.spent("compile_seconds"):
            self.state = decoding.run(self.decoder, self.slots.served.params, self.slots.empty(), 0)
            jax.block_until_ready(self.state)
        with self.timing.spent("prefill_seconds"):
            self.state, self.shared = jax.block_until_ready(self.slots.read_prefix(self.state, self.prefix))

    def enter(self) -> None:
        """Puts the next requests into free rows."""
        free = [row for row in range(self.slots.rows) if row not in self.held][: len(self.waiting)]
        if not free:
            return
        with self.timing.spent("prefill_seconds"):
            new = [self.waiting.popleft() for _ in free]
            lead = [indices[0] for indices in new]
            requests = [self.requests[i] for i in lead]
            self.state, self.kept = self.slots.enter(
                self.state, free, requests, self.keys[lead], self.shared, self.kept
            )
            jax.block_until_ready(self.state)
            self.held |= zip(free, new, strict=True)
            if self.race is not None:
                self.state, _ = self.race.bound(self.state, self.held)
            self.length[free], self.steps[free] = to_host(self.state.length)[free], 0

    def step(self) -> SimpleNamespace:
        """Makes one call on the device; returns the fields of the state for records, on the host.

        Those of whole texts come only if a record may be due or texts are watched: otherwise every call of a long text
        would fetch all of it."""
        with self.timing.spent("decode_seconds"):
            count = STEPS_PER_CALL if self.watch is None else WATCHED_STEPS
            least = len(self.held) - self.slots.share + 1
            self.state = decoding.run(self.decoder, self.slots.served.params, self.state, count, least)
            self._read_ahead()
            host = self._on_host(_PROGRESS)
            ended = any(host["finish"][row] != Finish.RUNNING for row in self.held)
            if ended or self.watch is not None or self.race is not None:
                host |= self._on_host(_TEXTS)
            return SimpleNamespace(**host)

    def _read_ahead(self) -> None:
        """Begins to read the prompts that enter next where other devices do that, while these decode."""
        if (reader := self.slots.served.reader) is None:
            return
        lead = [own[0] for own, _ in zip(self.waiting, range(self.slots.share), strict=False)]
        lead = [
            i for i in lead if self.requests[i].sample is None
        ]  # completions of a prompt share what the first one reads
        reader.read_ahead(self.slots, [self.requests[i] for i in lead], self.keys[lead], self.shared)

    def _on_host(self, names: Sequence[str]) -> dict[str, Any]:
        return to_host({name: getattr(self.state, name, None) for name in names})

    def harvest(self, host: SimpleNamespace) -> Turn:
        """The records of rows that ended; these rows become free.

        Args:
          host: from `step`.
        """
        rows = list(self.held)
        ended = [row for row in rows if host.finish[row] != Finish.RUNNING] + self._stopped(host)
        finished = [(index, self._record(host, row, index)) for row in ended for index in self.held[row]]
        for row in self._outrun(host, ended, finished):
            ended.append(row)
            finished.append((self.held[row][0], self._record(host, row, self.held[row][0])))
        if ended and self.on_end is not None:
            self.slots = self.slots.with_params(self.on_end(ended, self.state))
        self.timing.new_tokens += sum(record.new_tokens for _, record in finished)
        self.timing.steps += sum(int(host.stats.steps[row]) for row in ended)
        new_tokens, steps = self._moved(host, rows)
        for row in ended:
            del self.held[row]
        return Turn(finished, int(new_tokens.sum()), int(steps.sum()), int(steps.max()))

    def _stopped(self, host) -> list[int]:
        """The rows that wrote a stop string, which end there."""
        if self.watch is None:
            return []
        stopped = self.watch(host, {row: (own[0], self.requests[own[0]]) for row, own in self.held.items()})
        if stopped:
            host.finish = host.finish.copy()
            host.finish[stopped] = Finish.STOP
            finish = to_devices(host.finish, self.state.finish.sharding)
            self.state = dataclasses.replace(self.state, finish=finish)
        return stopped

    def _outrun(self, host, ended, finished) -> list[int]:
        """Ends rows for which another completion of their prompt was shorter."""
        if self.race is None:
            return []
        self.race.hear(finished)
        self.state, over = self.race.bound(self.state, {row: own for row, own in self.held.items() if row not in ended})
        host.finish = to_host(self.state.finish)
        return over

    def _record(self, host, row, index) -> Record:
        end = None if self.watch is None or self.decoder.num_texts > 1 else self.watch.end(index)
        return record_of(self.slots.served.tokenizer, self.requests[index], host, row, end)

    def _moved(self, host, rows) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that the last call added to these rows, and the passes in which they took part."""
        own, begin = [self.requests[self.held[row][0]] for row in rows], host.prompt_length[rows]
        count = np.minimum(host.length[rows] - begin, [each.max_new_tokens for each in own])  # a suffix follows
        known = begin + [each.written(n) for each, n in zip(own, count.tolist(), strict=True)]
        steps = host.stats.steps[rows]
        moved = known - self.length[rows], steps - self.steps[rows]
        self.length[rows], self.steps[rows] = known, steps
        return moved


def record_of(tokenizer: Any, request: Request, host: Any, row: int, end: End | None = None) -> Record:
    """The record of a request whose row ended, from the state's fields for records.

    Args:
      tokenizer: see `Served`.
      request: the row's request.
      host: these fields.
      row: the row's number.
      end: its text, if known.
    """
    ended = _of_rank(host, row, request.sample or 0)
    tokens = new_tokens(request, ended, row)
    decoded = request.written(len(tokens))
    reason = REASONS[Finish(int(ended.finish[row]))]
    text, count = (text_of(tokenizer, request, tokens), None) if end is None else end
    if count is not None:  # the tokens end where the stop string is complete, even if the last call went further
        reason, tokens = "stop", tokens[:count]
    steps = int(host.stats.steps[row])
    error = None
    if reason == "error":
        error = ended.missing or _undrawn(request, len(tokens))
    probs = host.logprobs
    begin = int(host.prompt_length[row])
    span = slice(begin, begin + len(tokens))
    return Record(
        prompt=request.prompt,
        text=text,
        tokens=tokens,
        finish_reason=reason,
        new_tokens=request.written(len(tokens)),
        steps=steps,
        tokens_per_step=round(decoded / steps, 4) if steps else 0.0,
        id=request.id,
        line=request.line,
        logprobs=None if probs is None else probs.raw[row, span].tolist(),
        warped_logprobs=None if probs is None else probs.warped[row, span].tolist(),
        accepted=host.stats.accepted[row].tolist(),
        suffix=request.suffix,
        error=error,
        sample=request.sample,
        score=ended.score,
        log_evidence=ended.evidence,
        nll=None if probs is None else -float(probs.raw[row, span].sum(dtype=np.float64)),
        self_certainty=None
        if probs is None or not tokens
        else float(probs.certainty[row, span].mean(dtype=np.float64)),
    )


def _undrawn(request: Request, count: int) -> str:
    """Why there was no token to draw after so many."""
    said = f"the model's logits were not finite (NaN or infinite) after {count} new tokens"
    removing = [
        name for each in WARPERS if each.removes for name in each.switches if is_set(name, getattr(request, name))
    ]
    return f"{said}, or {' and '.join(removing)} left no token" if removing else said


def _of_rank(host: Any, row: int, rank: int) -> Any:
    """The fields of a row as if it had ended with only the text of this rank, and its `score`, `evidence` and
    `missing`."""
    if host.found is None or host.finish[row] == Finish.ERROR:
        return SimpleNamespace(**vars(host), score=None, evidence=None, missing=None)
    order = np.argsort(-host.found.scores[row], kind="stable")
    at = order[rank]
    if host.found.scores[row, at] == -np.inf:
        finish, count = {row: Finish.ERROR}, int(np.isfinite(host.found.scores[row]).sum())
        missing = f"the search found {count} texts and none of rank {rank + 1}"
        return SimpleNamespace(
            **{**vars(host), "finish": finish, "length": host.prompt_length}, score=None, evidence=None, missing=missing
        )
    own = {name: {row: getattr(host.found, name)[row, at]} for name in ("length", "finish")}
    tokens = host.found.tokens[:, at]
    score, evidence = float(host.found.worth[row, at]), host.found.log_evidence
    evidence = None if evidence is None else float(evidence[row])
    return SimpleNamespace(**{**vars(host), **own, "tokens": tokens}, score=score, evidence=evidence, missing=None)
