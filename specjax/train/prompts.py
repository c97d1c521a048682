"""Training text that the target itself writes: the option `--prompts`."""

from pathlib import Path
from typing import Any

from specjax.jobs import generate
from specjax.jobs.options import JobOptions

ANSWERS = "answers.jsonl"


def check_sources(options: Any) -> None:
    """Raises ValueError unless text comes from exactly one of `--data`, `--prompts` and, where available,
    `--features`."""
    names = [name for name in ("data", "prompts", "features") if hasattr(options, name)]
    given = [name for name in names if getattr(options, name)]
    if len(given) != 1:
        words = ", ".join(f"--{name}" for name in names[:-1]) + f" or --{names[-1]}"
        raise ValueError(f"give one of {words}" + (f", not --{given[0]} and --{given[1]}" if given else ""))
    if options.prompts and not Path(options.prompts).is_file():
        raise ValueError(f"no prompts at {options.prompts!r}: there is no such file")


class Stopped(Exception):
    """The writing of answers was stopped.

    Attributes:
      status: the exit status.
    """

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


def written(options: Any, target: Any, folder: Path) -> tuple[str, ...]:
    """The files to train on. For `--prompts`, the target first writes the answers.

    They are written as by `specjax generate`, drawn from the target's own distribution at temperature 1 without
    filters. A stopped job resumes where it was.

    Args:
      options: of `train` or `capture`.
      target: what `specjax.models.load` returned.
      folder: receives the answers.

    Raises:
      Stopped: if not all of them were written.
    """
    if options.prompts is None:
        return options.data
    folder.mkdir(parents=True, exist_ok=True)
    answers = str(folder / ANSWERS)
    given: dict[str, Any] = {
        "input": options.prompts,
        "output": answers,
        "model": target,
        "mesh": options.mesh,
        "batch_size": options.batch_size,
        "temperature": 1.0,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
    }
    status = generate.command(JobOptions(**given))
    if status not in (0, 1):  # failed records are left out of the text, and reported
        raise Stopped(status)
    return (answers,)
