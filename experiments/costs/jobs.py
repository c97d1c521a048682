"""`python -m experiments.costs.jobs`: what refilling slots is worth where texts have different lengths, and with
`--shared-prefix N` what it is worth to prefill N tokens that all prompts begin with once. With `--groups G`, prompts begin
with N tokens of G kinds in turn, and it is what a prefix cache of `--prefix-cache` is worth, empty before every round.

The same prompts (openings of held-out functions) with `max_new_tokens` between 8 and `--most` (256), drawn uniformly once, go
through slots with refill, through static batches of as many rows, each of which waits for its longest text, and, where torch
is installed, through `transformers.generate` in the same batches. With a shared prefix they stand after the first N
tokens of all of them together, and slots that know of it run against slots that do not. Greedy, EOS ignored; only
tokens that were asked for count. Everyone is compiled first, then rounds alternate; the clock runs from token ids to
token ids, prefill included.
"""

import dataclasses
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax import models
from specjax.bench.peers.folders import target_folder
from specjax.bench.peers.with_transformers import TransformersPeer
from specjax.bench.run import Lap, Theirs, measure
from specjax.bench.stdlib import heldout_functions
from specjax.jobs import jsonl
from specjax.models import DEFAULT_MODEL
from specjax.serve.engine import SHORTEST_PREFIX, Engine
from specjax.serve.options import ModelOptions, check_least, option, same
from specjax.terminal import bad_input, flag, run_program

LEAST, MOST = 8, 256


@dataclasses.dataclass
class Ours:
    """An engine over the requests, with refill or in static batches.

    Attributes:
      engine: a `specjax.serve.engine.Engine`.
      requests: what to complete.
      slots: rows.
      static: whether a batch ends before the next one begins.
      prefix: ids to prefill once.
      known: the prefix cache's words on the last lap; empty without one.
      spent: processor seconds of every lap, which other programs on the machine hardly change.
      occupancy: of the last lap: the share of row passes that served a running request.
    """

    engine: Any
    requests: list[Any]
    slots: int
    static: bool
    prefix: tuple[int, ...] = ()
    occupancy: float = 0.0
    known: str = ""
    spent: list[float] = dataclasses.field(default_factory=list)

    def warm(self) -> None:
        """Compiles: one token of every prompt meets every prefill width."""
        self._run([dataclasses.replace(request, max_new_tokens=1) for request in self.requests])

    def lap(self) -> Lap:
        timing, cache = self.engine.timing, self.engine.prefix_cache
        timing.prompt_tokens = timing.known_tokens = 0
        if cache is not None:
            cache.clear()
        began, busy = time.perf_counter(), time.process_time()
        tokens = self._run(self.requests)
        self.spent.append(time.process_time() - busy)
        self.known = timing.known
        return Lap(tokens, time.perf_counter() - began)

    def _run(self, requests):
        capacity = self.engine.capacity(self.requests)
        size = self.slots if self.static else len(requests)
        tokens, steps, passes = [], 0, 0
        for start in range(0, len(requests), size):
            records = {}
            part = [dataclasses.replace(request, ignore_eos=True) for request in requests[start : start + size]]
            for turn in self.engine.turns(part, slots=self.slots, capacity=capacity, prefix=self.prefix):
                records.update(turn.finished)
                steps, passes = steps + turn.steps, passes + turn.passes
            tokens += [records[i].tokens for i in range(len(records))]
        self.occupancy = steps / (self.slots * passes)
        return tokens


def lengths(count: int, most: int = MOST) -> list[int]:
    """New tokens of every record: uniform between 8 and `most`; always the same."""
    rng = random.Random(0)
    return [rng.randint(LEAST, most) for _ in range(count)]


def compare(
    engine: Any,
    prompts: Sequence[Any],
    slots: int,
    repeats: int,
    peer: bool,
    prefix: tuple[int, ...] = (),
    most: int = MOST,
    groups: int = 1,
    caching: Any = None,
) -> dict[str, Any]:
    """Tokens a second of all, that of the first over that of each, occupancy and whether texts agree.

    Args:
      engine: a `specjax.serve.engine.Engine`.
      prompts: one per record.
      slots: rows.
      repeats: rounds.
      peer: whether to run transformers too.
      prefix: ids to put before every prompt; the first contestant then prefills them once, the second every time.
      most: the most new tokens of a record.
      groups: into how many kinds the prefix is cut, which stand before prompts in turn.
      caching: an engine like the first with a prefix cache; the first contestant for several groups.

    Raises:
      ValueError: where a text would be longer than the model was made for.
    """
    counts = lengths(len(prompts), most)
    kinds = [prefix[at * len(prefix) // groups : (at + 1) * len(prefix) // groups] for at in range(groups)]
    ids = [[*kinds[i % groups], *engine.encode(p)] if prefix else p for i, p in enumerate(prompts)]
    requests = [engine.request(p, max_new_tokens=n) for p, n in zip(ids, counts, strict=True)]
    longest = max(len(r.ids) + r.max_new_tokens for r in requests)
    if longest > engine.max_length:
        raise ValueError(f"a text of {longest} tokens is longer than the {engine.max_length} of {engine.model.name}")
    contestants: dict[str, Any] = {"refill": Ours(engine, requests, slots, static=False)}
    if caching is not None:
        contestants = {"prefix cache": Ours(caching, requests, slots, static=False), **contestants}
    elif prefix:
        contestants = {"shared": Ours(engine, requests, slots, static=False, prefix=prefix), **contestants}
    else:
        contestants["static"] = Ours(engine, requests, slots, static=True)
    if peer and not prefix:
        with tempfile.TemporaryDirectory() as scratch:
            model = TransformersPeer.load(target_folder(engine, Path(scratch)), engine.model.dtype.name)
        contestants["transformers"] = Theirs(TransformersPeer(model, slots), requests, slots)
    laps = measure(contestants, repeats, lambda name: None)
    speed = {name: statistics.median(lap.count / lap.seconds for lap in own) for name, own in laps.items()}
    texts = {name: own[0].tokens for name, own in laps.items()}
    first = next(iter(contestants))
    same = lambda name: sum(a == b for a, b in zip(texts[first], texts[name], strict=True))
    return {
        "model": engine.model.name,
        "records": len(requests),
        "slots": slots,
        "tokens": sum(map(len, texts[first])),
        "rows": [
            {
                "decoder": name,
                "tokens_per_second": round(speed[name], 1),
                "ratio": round(speed[first] / speed[name], 3),
                "occupancy": round(c.occupancy, 4) if isinstance(c, Ours) else None,
                "equal_texts": same(name),
                "processor_seconds": round(statistics.median(c.spent), 2) if isinstance(c, Ours) else None,
                "known": c.known if isinstance(c, Ours) else "",
            }
            for name, c in contestants.items()
        ],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefillOptions:
    """See the help of each."""

    model: str | None = option(None, "default: the shipped target")
    adapter: tuple[str, ...] = same(ModelOptions, "adapter")
    drafter: str | None = option(None, "of an autoregressive model (default: none)")
    records: int = option(128, "prompts", least=1)
    most: int = option(MOST, "the most new tokens of a record", metavar="N", least=LEAST)
    slots: int = option(8, "rows decoded together", least=1)
    shared_prefix: int = option(0, "tokens before every prompt", metavar="N")
    groups: int = option(1, "kinds of these tokens, in turn; for several, a prefix cache keeps them", least=1)
    prefix_cache: str = option("64MB", "the size of the prefix cache", metavar="SIZE")
    repeats: int = option(3, "rounds", least=1)
    json: bool = option(False, "print one line of JSON")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison and prints it."""
    about = "What refilling slots, or a shared prefix, is worth."
    return run_program("python -m experiments.costs.jobs", about, RefillOptions, command, argv)


def command(options: RefillOptions) -> int:
    """Measures and prints."""
    with bad_input():
        check_least(options, flag)
        if options.shared_prefix and options.shared_prefix < SHORTEST_PREFIX:
            raise ValueError(f"--shared-prefix must be 0 or at least {SHORTEST_PREFIX}, got {options.shared_prefix}")
        model = models.load(options.model or DEFAULT_MODEL, adapter=options.adapter)
        plain = options.drafter or (None if model.masked else "none")
        engine = Engine(model, plain if model.masked else None, drafter=None if model.masked else plain)
        caching = None
        if options.groups > 1:
            if not options.shared_prefix:
                raise ValueError("--groups cuts up no prefix: give --shared-prefix too")
            caching = Engine(model, drafter=plain, prefix_cache=options.prefix_cache)
        peer = importlib.util.find_spec("torch") is not None and model.masked is None
        prompts, prefix = heldout_functions(options.records), ()
        if options.shared_prefix:
            if model.masked:
                engine.shared_prefix([])  # says why not
            tokens = options.shared_prefix * options.groups
            prefix = tuple(i for prompt in prompts for i in engine.encode(prompt))[:tokens]
            if len(prefix) < tokens:
                raise ValueError(f"{len(prompts)} prompts have {len(prefix)} tokens: fewer than {tokens}")
        report = compare(
            engine, prompts, options.slots, options.repeats, peer, prefix, options.most, options.groups, caching
        )
    if options.json:
        sys.stdout.write(jsonl.dumps(report) + "\n")
        return 0
    kinds = f" of {options.groups} kinds" if options.groups > 1 else ""
    behind = f" after {options.shared_prefix} shared tokens{kinds}" if prefix else ""
    first = report["rows"][0]["decoder"]
    drafter = "" if engine.model.masked else f", drafter {options.drafter or 'none'}"
    print(
        f"{report['model']}{drafter}: {report['records']} records{behind} of {LEAST} to {options.most} new tokens, "
        f"{report['tokens']} in all, {options.slots} slots, median of {options.repeats}"
    )
    for row in report["rows"]:
        full = "" if row["occupancy"] is None else f", slots {row['occupancy']:.0%} full"
        busy = "" if row["processor_seconds"] is None else f", {row['processor_seconds']} processor seconds"
        print(
            f"{row['decoder']:13}{row['tokens_per_second']:8.1f} tokens/s, {first} is {row['ratio']:.2f} times that"
            f"{full}, {row['equal_texts']} of {report['records']} texts equal{busy}"
            + (f", {row['known']}" if row["known"] else "")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
