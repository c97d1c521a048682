"""`specjax bench`: plain decoding, drafters and peers over the same prompts, in the same minutes.

Every contestant is compiled and warmed first. Then rounds alternate between them (A B C, A B C, ...): a round decodes all
prompts, and a contestant's speed is the median of its rounds. The clock runs from token ids to token ids, prefill included,
compilation and tokenisation not, for us and for peers alike; EOS is ignored, so that all make equally many tokens.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from specjax.jobs import jsonl
from specjax.spec.line import lines

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Lap:
    """One round of one contestant.

    Attributes:
      tokens: new ids of every prompt.
      seconds: wall time of the round.
      decode_seconds: of its decoding steps alone; 0 where that is not known.
      steps: target passes; 0 where that is not known.
      accepted: how many steps accepted 0, 1, 2 ... draft tokens.
    """

    tokens: list[list[int]]
    seconds: float
    decode_seconds: float = 0.0
    steps: int = 0
    accepted: tuple[int, ...] = ()

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

    def warm(self) -> None:
        """Compiles: one token of every prompt meets every prefill width."""
        self._run([dataclasses.replace(request, max_new_tokens=1) for request in self.requests])

    def lap(self) -> Lap:
        decoded = self.engine.timing.decode_seconds
        began = time.perf_counter()
        records = self._run(self.requests)
        seconds = time.perf_counter() - began
        accepted = tuple(sum(counts) for counts in zip(*(record.accepted for record in records), strict=True))
        steps = sum(record.steps for record in records)
        spent = self.engine.timing.decode_seconds - decoded
        return Lap([record.tokens for record in records], seconds, spent, steps, accepted)

    def _run(self, requests):
        return list(
            self.engine.run(requests, batch_size=self.batch_size, ignore_eos=True, capacity=self.capacity)
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """What a decoder did; the fields of the JSON output.

    Attributes:
      decoder: its registry line; of a diffusion model unmask and cache policy.
      tokens_per_step: new tokens a forward pass of the target.
      tokens_per_second: median of the rounds.
      ratio_to_plain: its speed over plain decoding's.
      step_ratio: seconds a step, prefill apart, over plain decoding's.
      identical_text: whether every token equals plain decoding's.
      acceptance_by_depth: the share of steps that accepted at least 1, 2, ... draft tokens (diffusion: committed so many).
    """

    decoder: str
    tokens_per_step: float
    tokens_per_second: float
    ratio_to_plain: float
    step_ratio: float
    identical_text: bool
    acceptance_by_depth: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class PeerRow:
    """What another library did; `identical_text` is against our plain decoding."""

    peer: str
    mode: str
    tokens_per_second: float
    identical_text: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
      rows: one a decoder; plain decoding (one token a step, without a cache of its own for diffusion) is the first.
      peers: one a peer's mode.
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
    """Warms everyone, then alternates between them.

    Args:
      contestants: by name.
      repeats: rounds.
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


def summarise(laps: dict[str, list[Lap]], peers: dict[str, tuple[str, str]], about: str) -> Report:
    """Rows from laps. The first is plain decoding; `peers` maps a contestant to its peer and mode."""
    base = next(iter(laps))
    speed = {name: statistics.median(lap.count / lap.seconds for lap in own) for name, own in laps.items()}
    step = {
        name: statistics.median(lap.decode_seconds / max(lap.steps, 1) for lap in own) for name, own in laps.items()
    }  # fmt: skip
    plain = laps[base][0].tokens
    same = {name: all(lap.tokens == plain for lap in own) for name, own in laps.items()}
    ours = [name for name in laps if name not in peers]
    rows = [
        Row(
            decoder=name,
            tokens_per_step=round(laps[name][0].count / max(laps[name][0].steps, 1), 4),
            tokens_per_second=round(speed[name], 2),
            ratio_to_plain=round(speed[name] / speed[base], 4),
            step_ratio=round(step[name] / step[base], 4),
            identical_text=same[name],
            acceptance_by_depth=survival(laps[name][0].accepted),
        )
        for name in ours
    ]
    others = [PeerRow(*peers[name], round(speed[name], 2), same[name]) for name in laps if name in peers]
    return Report(rows, others, about)


def survival(accepted: tuple[int, ...]) -> tuple[float, ...]:
    """From counts of steps that accepted 0, 1, 2 ... tokens: the share that accepted at least 1, 2, ...

    >>> survival((2, 1, 1))
    (0.5, 0.25)
    """
    total = max(sum(accepted), 1)
    return tuple(round(sum(accepted[depth:]) / total, 4) for depth in range(1, len(accepted)))


SUITES = "parallel: ParallelBench's list tasks; order: in which step each position behind the first prompt became known"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax bench`."""
    from specjax.terminal import add_model_options

    add_model_options(parser)
    add = parser.add_argument
    add("suite", nargs="?", choices=("speed", "parallel", "order"), default="speed", help=SUITES)
    add("--tasks", metavar="A,B,...", help="of the suite parallel (default: all)")
    add("--samples", type=int, default=100, metavar="N", help="questions a task of the suite parallel")
    add("--drafter", action="append", metavar="NAME", help="may be repeated or a comma list; plain is always run")
    add("--unmask", action="append", metavar="POLICY", help="of a diffusion model; likewise (default: threshold)")
    add(
        "--cache",
        action="append",
        metavar="POLICY",
        help="of a diffusion model; likewise (default: none, prefix and dual)",
    )
    add("--block-length", type=int, metavar="N", help="of a diffusion model (default: 32)")
    add("--prompts", type=int, default=20, metavar="N", help="how many held-out functions, or lines of --input")
    add("--input", metavar="FILE.jsonl", help="prompts from a file")
    add("--peer", choices=["transformers"], help="run it over the same folder, greedy and with prompt lookup")
    add("--repeats", type=int, default=3, help="rounds")
    add("--batch-size", type=int, default=1, help="rows decoded together")
    add("--json", action="store_true", help="print one line of JSON")
    add("--plot", metavar="FILE.png", help="write a picture of speeds and acceptance by depth")


def command(args: argparse.Namespace) -> int:
    """Runs the bench for parsed options; returns the exit status."""
    from specjax.terminal import bad_input, note

    with bad_input():
        check_suite(args)
    if args.suite != "speed":
        from specjax.bench import order, parallel_run

        return {"parallel": parallel_run, "order": order}[args.suite].command(args)
    with bad_input():
        contestants, peers, about, skipped = prepare(args)
    for reason in skipped:
        note(reason)
    with progress(len(contestants) * (args.repeats + 1)) as advance:
        report = summarise(measure(contestants, args.repeats, advance), peers, about)
    from specjax.bench import report as reporting

    if args.json:
        sys.stdout.write(jsonl.dumps(report.to_json()) + "\n")
    else:
        reporting.table(report)
    if args.plot:
        reporting.plot(report, args.plot)
    return 0


def check_suite(args: argparse.Namespace) -> None:
    """Raises ValueError on an option of another suite, or a count below 1."""
    foreign = {"parallel": ("input", "peer", "plot"), "order": ("tasks", "peer"), "speed": ("tasks",)}[args.suite]
    wrong = [name for name in foreign if getattr(args, name) is not None]
    if wrong:
        raise ValueError(f"--{wrong[0]} is not for the suite {args.suite}")
    for name in ("prompts", "repeats", "batch_size", "samples"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")


def prepare(args: argparse.Namespace) -> tuple[dict[str, Contestant], dict[str, tuple[str, str]], str, list[str]]:
    """Contestants by name, which of them are peers, the setting in words, and why a default drafter was left out.

    Raises:
      ValueError: on options or prompts that cannot be used.
    """
    from specjax.bench import report as reporting

    if args.peer and (args.temperature > 0 or args.batch_size > 1):
        raise ValueError("--peer compares greedy decoding at batch 1: leave out --temperature and --batch-size")
    if args.plot:
        reporting.check_plot(args.plot)
    texts, suffixes = prompts_of(args)

    engines, skipped = engines_of(args)
    of_engines = requests_of(args, engines, texts, suffixes, skipped)
    plain = next(iter(engines.values()))
    requests = next(iter(of_engines.values()))
    contestants: dict[str, Contestant] = {
        name: Ours(engines[name], own, args.batch_size, engines[name].capacity(own)) for name, own in of_engines.items()
    }
    peers: dict[str, tuple[str, str]] = {}
    if args.peer:
        from specjax.bench.peer import MODES, TransformersPeer

        model = TransformersPeer.load(plain.model.path, plain.model.dtype.name)
        for mode in MODES:
            contestants[f"{args.peer} {mode}"] = TransformersPeer(
                model, mode, [request.ids for request in requests], args.max_new_tokens
            )
            peers[f"{args.peer} {mode}"] = (args.peer, mode)
    law = f"temperature {args.temperature:g}, seed {args.seed}" if args.temperature else "greedy"
    about = (
        f"{plain.model.name}, {plain.model.dtype.name}, {len(requests)} prompts x {args.max_new_tokens} tokens, {law}, "
        f"batch {args.batch_size}, median of {args.repeats}"
    )
    return contestants, peers, about, skipped


def requests_of(
    args: argparse.Namespace, engines: dict[str, Any], texts: list[Any], suffixes: list[Any], skipped: list[str]
) -> dict[str, list[Any]]:
    """The requests of every engine that takes them, by its name; why another does not is added to `skipped`.

    Raises:
      ValueError: where the first engine takes them not, or a text would be longer than the model was made for.
    """
    from specjax.serve.request import check_options

    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    check_options(options)
    found: dict[str, list[Any]] = {}
    for name, engine in engines.items():
        try:
            found[name] = [
                engine.request(text, suffix=after, **options) for text, after in zip(texts, suffixes, strict=True)
            ]
        except ValueError as error:
            if not found:
                raise
            skipped.append(f"left out {name}: {error}")
    plain = next(iter(engines.values()))
    for number, request in enumerate(next(iter(found.values())), start=1):
        if len(request.ids) + args.max_new_tokens > plain.max_length:
            raise ValueError(
                f"prompt {number} has {len(request.ids)} tokens: with {args.max_new_tokens} new ones it is longer than "
                f"the {plain.max_length} that {plain.model.name} was made for; lower --max-new-tokens"
            )
    return found


def engines_of(args: argparse.Namespace, baseline: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Engines by name, and why a default drafter was left out; with `baseline` plain decoding is the first."""
    from specjax import models
    from specjax.serve.engine import DEFAULT_MODEL
    from specjax.sharding import make_mesh

    model = models.load(
        DEFAULT_MODEL if args.model is None else args.model, dtype=args.dtype, mesh=make_mesh(args.mesh)
    )
    if model.canvas:
        raise ValueError(
            f"bench compares policies of models with a mask, and {model.name} has none: `specjax generate` reports its passes"
        )
    foreign = ("drafter", "peer") if model.masked else ("unmask", "cache", "block_length")
    wrong = [name for name in foreign if getattr(args, name) is not None]
    if wrong:
        kind = "a diffusion" if model.masked else "an autoregressive"
        raise ValueError(f"{model.name} is {kind} model: --{wrong[0].replace('_', '-')} is not for it")
    return (_masked_engines if model.masked else _drafting_engines)(args, model, baseline)


def _drafting_engines(args: argparse.Namespace, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    from specjax.serve.engine import Engine
    from specjax.spec.registry import DRAFTERS

    engines, skipped = {}, []
    for drafter in dict.fromkeys([*["none"][:baseline], *_every(args.drafter or ["all"], DRAFTERS)]):
        try:
            engines[drafter] = Engine(model, drafter, mesh=args.mesh)
        except ValueError as error:
            if args.drafter:
                raise
            skipped.append(f"left out {drafter}: {error}")
    return engines, skipped


def _masked_engines(args: argparse.Namespace, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    from specjax.serve.engine import Engine
    from specjax.spec.registry import CACHES, UNMASKS

    chosen = [
        (unmask, cache)
        for unmask in _every(args.unmask or ["threshold"], UNMASKS)
        for cache in _every(args.cache or ["none", "prefix", "dual"], CACHES)
    ]
    engines, skipped = {}, []
    failed: dict[str, ValueError] = {}
    for unmask, cache in dict.fromkeys([*[("fixed", "none")][:baseline], *chosen]):
        try:
            engines[f"{unmask}/{cache}"] = Engine(
                model, unmask=unmask, cache=cache, block_length=args.block_length, mesh=args.mesh
            )
        except ValueError as error:
            if args.cache and "all" not in [*args.cache, *(args.unmask or [])]:
                raise
            skipped.append(f"left out {unmask}/{cache}: {error}")
            failed.setdefault(unmask, error)
    useless = [error for unmask, error in failed.items() if not any(name.startswith(f"{unmask}/") for name in engines)]
    if useless and (not engines or "all" not in (args.unmask or [])):
        raise useless[0]
    return engines, skipped


def _every(texts: Sequence[str], table: dict[str, Any]) -> list[str]:
    return [name for line in lines(texts) for name in (table if line == "all" else [line])]


def prompts_of(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Prompts, and what follows each new text (None: nothing)."""
    if not args.input:
        from specjax.bench.stdlib import heldout_functions

        texts = list(heldout_functions(args.prompts))
        return texts, [None] * len(texts)
    lines = jsonl.read(args.input)[: args.prompts]
    bad = [line for line in lines if line.error]
    if bad or not lines:
        why = f"line {bad[0].number}: {bad[0].error}" if bad else "it has no valid line"
        raise ValueError(f"{args.input}: {why}")
    return [line.prompt for line in lines], [line.suffix for line in lines]


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("bench", total=total)
        yield lambda name: progress.update(task, advance=1, description=name)
