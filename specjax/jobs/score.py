"""`specjax score`: log-probabilities of continuations from a file of JSON lines."""

import bisect
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from specjax import models
from specjax.jobs import jsonl
from specjax.jobs.files import check_output, finish, journal, read_lines
from specjax.jobs.options import PIPE, FileOptions
from specjax.jobs.output import Output, OutputError
from specjax.jobs.work import kept, score_manifest
from specjax.serve.engine import Engine
from specjax.serve.options import ModelOptions, check_least, option, same
from specjax.serve.record_bar import bar_fits, record_bar
from specjax.serve.score import Pair, Score, Scorer
from specjax.serve.scorers import scorer_of
from specjax.sharding import make_mesh
from specjax.terminal import BadInput, bad_input, complain, flag, note, write

FIELDS = ("prompt", "messages", "continuation", "id")
Item = Pair | Score
"""A line's pair, or a score with its error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The options of `specjax score`; see the help of each."""

    model: str | None = same(ModelOptions, "model")
    dtype: str | None = same(ModelOptions, "dtype")
    mesh: str | None = same(ModelOptions, "mesh")
    adapter: tuple[str, ...] = same(ModelOptions, "adapter")
    weights: str | None = same(ModelOptions, "weights")
    input: str = option(
        dataclasses.MISSING,
        "lines of {prompt or messages, continuation, optionally id}, or - for stdin; also .jsonl.gz, .parquet or .tar, a "
        "folder or pattern of them, a URL",
        metavar="FILE.jsonl",
    )
    output: str | None = option(
        None,
        "append records to this file (or .jsonl.gz, .parquet, .tar, a URL); the same command resumes a killed run; - prints "
        "them (the default)",
        metavar="FILE.jsonl",
    )
    batch_size: int = option(8, "rows read together; changes speed, and scores only by rounding", least=1)
    samples: int | None = option(
        None,
        "masks of a text, for a masked-diffusion model, whose scores are bounds (default: 128)",
        metavar="N",
        least=1,
    )
    strict: bool = same(FileOptions, "strict")

    @property
    def file(self) -> str | None:
        """The output if it is a file."""
        return None if self.output == PIPE else self.output


@dataclasses.dataclass(frozen=True)
class ScoreLine(jsonl.Line):
    """A line with a continuation.

    Attributes:
      continuation: text or token ids; None if there is none to show.
    """

    continuation: Any = None


def command(options: ScoreOptions) -> int:
    """`specjax score`."""
    with bad_input():
        check_least(options, flag)
        if options.file:
            check_output(options.file, options.input)
        lines = read_lines(options, options.input, line_of)
        mesh = make_mesh(options.mesh)
        how = {"adapter": options.adapter, "weights": options.weights}
        engine = Engine(models.load(options.model, options.dtype, mesh, **how), mesh=mesh)
        scorer = scorer_of(engine, options.samples)
        failure = lambda item: (item.line, item.error) if isinstance(item, Score) else None
        items = kept(options, (item_of(scorer, line) for line in lines), failure)
        manifest = score_manifest(engine, lines)
        output = Output(journal(options.file), manifest, items) if options.file else None
    if output is None or options.file is None:
        return _write(options, scorer, items, None)
    with contextlib.closing(output):
        status = _write(options, scorer, items, output)
    finish(options.file, output)
    return status


def _write(options: ScoreOptions, scorer: Scorer, items: Sequence[Item], output: Output | None) -> int:
    """Writes the missing records; returns the exit status."""
    done = {} if output is None else output.done
    if output is not None and done:
        note(f"{len(done)} of {len(items)} records are in {output.path} already")
    failed = sum(done.values())
    try:
        for score in _scores(scorer, items, len(done), options):
            if output is None:
                write(jsonl.dumps(score.to_json()) + "\n")
            else:
                output.append(score)
                output.tick()
            if score.error is not None:
                failed += 1
                complain(f"{options.input}, line {score.line}: {score.error}")
        if output is not None:
            output.sync()
    except OutputError as error:
        raise BadInput(str(error)) from error
    return 1 if failed else 0


def line_of(number: int, content: dict[str, Any]) -> ScoreLine:
    """A line from an object with `prompt` or `messages`, `continuation` and optionally `id`."""
    if jsonl.deeper(content):
        return ScoreLine(number, error=f"nested more than {jsonl.DEEPEST} levels deep")
    (prompt, name), continuation = jsonl.shown(content), content.get("continuation")
    error = None
    try:
        key, _ = jsonl.check_prompt(content)
        if key == "messages" and not prompt:
            raise jsonl.LineError("the messages are empty")
        if continuation is None:
            raise jsonl.LineError("it has no continuation: give a string or a list of token ids")
        jsonl.check_tokens("continuation", continuation)
        jsonl.check_name(content)
    except jsonl.LineError as wrong:
        error = str(wrong)
    unknown = tuple(key for key in content if key not in FIELDS)
    continuation = continuation if isinstance(continuation, (str, list)) else None
    return ScoreLine(number, prompt, name, unknown=unknown, error=error, continuation=continuation)


def item_of(scorer: Scorer, line: jsonl.Line) -> Item:
    """A pair from a good line, and a failed score from a bad one."""
    continuation = line.continuation if isinstance(line, ScoreLine) else None
    reason = line.error
    if reason is None:
        try:
            return scorer.pair(line.prompt, continuation, id=line.id, line=line.number)
        except ValueError as error:
            reason = str(error)
    return Score.failed(line.prompt, continuation, f"{line.where}{reason}", line.id, line.number)


class _Pairs(Sequence[Pair]):
    """The items at these places, all of them pairs, each read when it is asked for."""

    def __init__(self, items: Sequence[Item], places: list[int]):
        self._items, self._places = items, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._items[place] for place in self._places[index]]
        return self._items[self._places[index]]


def _scores(scorer: Scorer, items: Sequence[Item], done: int, options: ScoreOptions) -> Iterator[Score]:
    """Yields scores of the items after the first `done`, in order; notes the duration at the end."""
    began, tokens, count = time.monotonic(), 0, 0
    places = [i for i, item in enumerate(items) if isinstance(item, Pair)]
    start = bisect.bisect_left(places, done)
    scored = scorer.run(_Pairs(items, places), batch_size=options.batch_size, start=start)
    shown = options.file is not None and bar_fits()
    with record_bar(len(items), done) if shown else contextlib.nullcontext(lambda *_: None) as advance:
        for item in map(items.__getitem__, range(done, len(items))):
            score = item if isinstance(item, Score) else next(scored)
            count, tokens = count + (score.error is None), tokens + len(score.tokens)
            yield score
            advance(1, "")
    if count:
        spent = time.monotonic() - began
        note(f"{count} continuations of {tokens} tokens in {spent:.1f} s, compiling included")
