"""`specjax score`: log-probabilities of continuations in a file of JSON lines."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from specjax.jobs import jsonl
from specjax.jobs.files import check_output, journal, packed, read_lines
from specjax.jobs.options import PIPE, FileOptions
from specjax.jobs.work import check_lines
from specjax.serve.engine import Engine
from specjax.serve.options import DecodeOptions, check_least, option, same
from specjax.serve.progress import bar_fits, record_bar
from specjax.serve.score import Pair, Score, Scorer
from specjax.terminal import BadInput, bad_input, complain, flag, note, write

FIELDS = ("prompt", "messages", "continuation", "id")
Item = Pair | Score
"""A line's pair, or the score that says what is wrong with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What `specjax score` was asked for; see the help of each."""

    model: str | None = same(DecodeOptions, "model")
    dtype: str | None = same(DecodeOptions, "dtype")
    mesh: str | None = same(DecodeOptions, "mesh")
    input: str = option(
        dataclasses.MISSING,
        "lines of {prompt or messages, continuation, optionally id}; FILE.jsonl.gz, a table FILE.parquet, or - for lines on "
        "stdin",
        metavar="FILE.jsonl",
    )
    output: str | None = option(
        None, "a new file for the records (or FILE.jsonl.gz, FILE.parquet); - or none prints them", metavar="FILE.jsonl"
    )
    batch_size: int = option(8, "rows read together; changes speed, and scores by rounding alone", least=1)
    strict: bool = same(FileOptions, "strict")

    @property
    def file(self) -> str | None:
        """The output where it is a file."""
        return None if self.output == PIPE else self.output


@dataclasses.dataclass(frozen=True)
class ScoreLine(jsonl.Line):
    """A line with a continuation.

    Attributes:
      continuation: text or token ids; None where there is none that can be shown.
    """

    continuation: Any = None


def command(options: ScoreOptions) -> int:
    """`specjax score`."""
    with bad_input():
        check_least(options, flag)
        if options.file:
            _check_new(options.file, options.input)
        lines = read_lines(options, options.input, line_of)
        scorer = Scorer(Engine(options.model, dtype=options.dtype, mesh=options.mesh))
        items = [item_of(scorer, line) for line in lines]
        check_lines(options, [(item.line, item.error) for item in items if isinstance(item, Score)], len(items))
    failed = 0
    with _written(options.file) as append:
        for score in _scores(scorer, items, options):
            append(jsonl.dumps(score.to_json()) + "\n")
            if score.error is not None:
                failed += 1
                complain(f"{options.input}, line {score.line}: {score.error}")
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
    return Score.failed(line.prompt, continuation, reason, line.id, line.number)


def _scores(scorer: Scorer, items: list[Item], options: ScoreOptions) -> Iterator[Score]:
    """Scores of all items, in order; at the end a note of how long it took."""
    began, tokens, count = time.monotonic(), 0, 0
    scored = scorer.run([item for item in items if isinstance(item, Pair)], batch_size=options.batch_size)
    shown = options.file is not None and bar_fits()
    with record_bar(len(items)) if shown else contextlib.nullcontext(lambda *_: None) as advance:
        for item in items:
            score = item if isinstance(item, Score) else next(scored)
            count, tokens = count + (score.error is None), tokens + len(score.tokens)
            yield score
            advance(1, "")
    spent = time.monotonic() - began
    note(f"{count} continuations of {tokens} tokens in {spent:.1f} s, compiling included")


def _check_new(output: str, source: str) -> None:
    """Raises ValueError where records cannot go there, or others are there."""
    check_output(output, source)
    for path in {output, journal(output)}:
        if os.path.isfile(path) and os.path.getsize(path):
            raise ValueError(f"the output file {path!r} exists: move it away or choose another --output")


@contextlib.contextmanager
def _written(path: str | None) -> Iterator[Callable[[str], Any]]:
    """What writes a line: to stdout, or to a file that is whole at the end, compressed where its name says so."""
    if path is None:
        yield write
        return
    lines, kind = journal(path), packed(path)
    try:
        with open(lines, "w", encoding="utf-8", buffering=1) as file:  # a killed run leaves whole lines
            yield file.write
        if kind is not None:
            kind.write(path, lines)
            os.unlink(lines)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BadInput(f"cannot write the output file {path!r}: {error.strerror or error}") from error
