"""`specjax eval`: accuracy and speed of decoders on verifiable tasks."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.evaluate import report
from specjax.evaluate.options import EvalOptions
from specjax.evaluate.results import Answer
from specjax.evaluate.run import OnAnswers, prepare, run
from specjax.jobs import jsonl
from specjax.search import ScorerError
from specjax.serve.options import check_least
from specjax.serve.record_bar import bar_fits
from specjax.terminal import BadInput, bad_input, flag, note, write
from specjax.viz.files import check_plot


def command(options: EvalOptions) -> int:
    """Asks, checks and reports; returns the exit status."""
    with bad_input():
        check_least(options, flag)
        if options.plot:
            check_plot(options.plot)
        if options.answers:
            check_answers(options.answers)
        prepared = prepare(options)
    with _written(options.answers) as on_answers:
        try:
            found = run(prepared, bar_fits(), on_answers)
        except ScorerError as error:
            raise BadInput(str(error)) from error
    if options.json:
        write(jsonl.dumps(found.to_json()) + "\n")
    else:
        report.tables(found)
    if options.plot:
        report.plot(found, options.plot)
    for remark in report.remarks(found):
        note(remark)
    return 1 if any(row.count("error") for row in found.rows) else 0


def check_answers(path: str) -> None:
    """Raises ValueError if the file of answers cannot be written or already exists."""
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"--answers {path!r}: give a file in a folder that exists")
    if os.path.exists(path) and os.path.getsize(path):
        raise ValueError(f"the file of answers {path!r} exists: move it away or choose another --answers")


@contextlib.contextmanager
def _written(path: str | None) -> Iterator[OnAnswers | None]:
    """A function that writes answers line by line; None if there is no file for them."""
    if path is None:
        yield None
        return
    with open(path, "w", encoding="utf-8", buffering=1) as file:  # a killed run leaves complete lines

        def on_answers(answers: Sequence[Answer]) -> None:
            file.writelines(jsonl.dumps(dataclasses.asdict(answer)) + "\n" for answer in answers)

        yield on_answers
