"""Laps of plain decoding, drafters and peers over the same prompts at the same time, and their results.

Every contestant is compiled and warmed up first. Then rounds alternate between them (A B C, A B C, ...). A round
decodes all prompts, and a contestant's speed is the median of its rounds. For specjax and peers alike, the clock runs
from token ids to token ids, with prefill and without compilation and tokenisation. A text ends at EOS unless EOS is
ignored.
"""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from specjax.serve.record_bar import bar_fits
from specjax.terminal import note
from specjax.viz.data import survival

Ids = tuple[int, ...]

WINDOW = 96
"""The last tokens of a text that its diversity is taken of, as in the published code of hyperfitting."""


@dataclasses.dataclass(frozen=True)
class Lap:
    """One round of one contestant.

    Attributes:
      tokens: new ids of every prompt.
      seconds: wall time of the round.
      decode_seconds: the time of its decoding steps only; 0 if unknown.
      steps: the number of target passes; 0 if unknown.
      accepted: how many steps accepted 0, 1, 2 ... draft tokens.
      each: target passes of every prompt; empty if unknown.
    """

    tokens: list[list[int]]
    seconds: float
    decode_seconds: float = 0.0
    steps: int = 0
    accepted: tuple[int, ...] = ()
    each: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


class Contestant(Protocol):
    """Anything that completes prompts."""

    def warm(self) -> None: ...

    def lap(self) -> Lap: ...


@dataclasses.dataclass(frozen=True)
class Ours:
    """One engine and its requests."""

    engine: Any
    requests: list[Any]
    batch_size: int
    capacity: int
    ignore_eos: bool = True

    def warm(self) -> None:
        """Compiles, by decoding one token of every prompt, which covers every prefill width."""
        self._run([dataclasses.replace(request, max_new_tokens=1) for request in self.requests])

    def lap(self) -> Lap:
        decoded = self.engine.timing.decode_seconds
        began = time.perf_counter()
        records = self._run(self.requests)
        seconds = time.perf_counter() - began
        accepted = tuple(sum(counts) for counts in zip(*(record.accepted for record in records), strict=True))
        each = tuple(record.steps for record in records)
        spent = self.engine.timing.decode_seconds - decoded
        return Lap([record.tokens for record in records], seconds, spent, sum(each), accepted, each)

    def _run(self, requests):
        own = [dataclasses.replace(request, ignore_eos=self.ignore_eos) for request in requests]
        return list(self.engine.run(own, batch_size=self.batch_size, capacity=self.capacity))


class Peer(Protocol):
    """Another library's model. `complete` returns the new token ids of every request, with the id that ended it."""

    def complete(self, requests: Sequence[Any]) -> list[list[int]]: ...


@dataclasses.dataclass(frozen=True)
class Theirs:
    """One peer and its requests."""

    peer: Peer
    requests: list[Any]
    batch_size: int

    def warm(self) -> None:
        self.peer.complete([dataclasses.replace(r, max_new_tokens=4) for r in self.requests[: self.batch_size]])

    def lap(self) -> Lap:
        began = time.perf_counter()
        return Lap(self.peer.complete(self.requests), time.perf_counter() - began)


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder's results, with the fields of the JSON output.

    Attributes:
      decoder: its registry line; for a diffusion model, its unmask and cache policies.
      tokens_per_step: new tokens per forward pass of the target.
      tokens_per_second: the median of the rounds.
      ratio_to_plain: its speed relative to plain decoding.
      step_ratio: seconds per step without prefill, relative to plain decoding.
      identical_text: whether every token equals plain decoding's.
      acceptance_by_depth: the share of steps that accepted at least 1, 2, ... draft tokens (for diffusion: committed so
        many).
      mbsu: the memory-bound speed-up (arXiv:2403.00858): its tokens per step over the weights that a step reads, as
        multiples of what a plain step reads. None if that is unknown.
      type_token_ratio: how many of the last tokens of a text are different ones, as a share; see `type_token_ratio`.
    """

    decoder: str
    tokens_per_step: float
    tokens_per_second: float
    ratio_to_plain: float
    step_ratio: float
    identical_text: bool
    acceptance_by_depth: tuple[float, ...]
    mbsu: float | None = None
    type_token_ratio: float = 0.0


@dataclasses.dataclass(frozen=True)
class PeerRow:
    """Another library's results. `identical_text` compares with our plain decoding; None if it drew other random
    numbers."""

    peer: str
    mode: str
    tokens_per_second: float
    identical_text: bool | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a whole run.

    Attributes:
      rows: one per decoder; the first is plain decoding (one token per step; for diffusion, without a cache).
      peers: one per peer and mode.
      about: the setting in words.
    """

    rows: list[Row]
    peers: list[PeerRow]
    about: str

    def to_json(self) -> dict[str, Any]:
        """Rows and peers as JSON objects."""
        return {
            "rows": [dataclasses.asdict(r) for r in self.rows],
            "peers": [dataclasses.asdict(p) for p in self.peers],
        }


def measure(contestants: dict[str, Contestant], repeats: int, advance: Callable[[str], None]) -> dict[str, list[Lap]]:
    """Warms up all contestants, then alternates between them.

    Args:
      contestants: by name.
      repeats: the number of rounds.
      advance: called with the contestant's name after each warm-up and lap.
    """
    for name, contestant in contestants.items():
        contestant.warm()
        advance(name)
    laps: dict[str, list[Lap]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            laps[name].append(contestant.lap())
            advance(name)
    return laps


def summarise(
    laps: dict[str, list[Lap]],
    peers: dict[str, tuple[str, str]],
    about: str,
    drawn: bool = False,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> Report:
    """Rows from laps; the first is plain decoding.

    Args:
      laps: by contestant.
      peers: maps a contestant to its peer and mode.
      about: the setting in words.
      drawn: whether tokens were sampled, so that a peer's differ.
      weights: bytes of weights that a step reads, by contestant, as far as they are known.
    """
    base = next(iter(laps))
    speed = {name: statistics.median(lap.count / lap.seconds for lap in own) for name, own in laps.items()}
    step = {
        name: statistics.median(lap.decode_seconds / max(lap.steps, 1) for lap in own) for name, own in laps.items()
    }  # fmt: skip
    plain = laps[base][0].tokens
    same = {name: all(lap.tokens == plain for lap in own) for name, own in laps.items()}
    ours = [name for name in laps if name not in peers]
    per_step = {name: laps[name][0].count / max(laps[name][0].steps, 1) for name in ours}
    rows = [
        Row(
            decoder=name,
            tokens_per_step=round(per_step[name], 4),
            tokens_per_second=round(speed[name], 2),
            ratio_to_plain=round(speed[name] / speed[base], 4),
            step_ratio=round(step[name] / step[base], 4),
            identical_text=same[name],
            acceptance_by_depth=survival(laps[name][0].accepted),
            mbsu=round(per_step[name] * weights[base] / weights[name], 4) if {base, name} <= weights.keys() else None,
            type_token_ratio=round(type_token_ratio(laps[name][0].tokens), 4),
        )
        for name in ours
    ]
    others = [
        PeerRow(*peers[name], round(speed[name], 2), None if drawn else same[name]) for name in laps if name in peers
    ]
    return Report(rows, others, about)


def type_token_ratio(texts: Sequence[Sequence[int]]) -> float:
    """The share of different tokens among the last `WINDOW` of a text, averaged over texts that have any.

    Greedy text that repeats itself has a low one (hyperfitting, arXiv:2412.04318). 0 if no text has a token.

    >>> type_token_ratio([[1, 2, 1, 2], [7], []])
    0.75
    """
    ends = [text[-WINDOW:] for text in texts if len(text)]
    return statistics.fmean(len({*end}) / len(end) for end in ends) if ends else 0.0


def minutes(total: int, every: float = 60.0, clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Says on stderr how many of `total` laps are over, at most once in `every` seconds.

    Args:
      total: the number of laps.
      every: seconds between two lines.
      clock: tells the time in seconds.
    """
    done, told = itertools.count(1), [clock()]

    def advance(name: str) -> None:
        number, now = next(done), clock()
        if now - told[0] >= every and number < total:
            told[0] = now
            note(f"bench: {number} of {total}, last {name}")

    return advance


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar of laps on a terminal, elsewhere a line a minute; yields a function to be called with whose lap is over."""
    if not bar_fits():
        yield minutes(total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("bench", total=total)
        yield lambda name: progress.update(task, advance=1, description=name)
