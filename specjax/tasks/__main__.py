"""`python -m specjax.tasks`: questions with their answers, to read or as JSON lines."""

import argparse
import json
import sys
from collections.abc import Sequence

from specjax import terminal
from specjax.tasks import FAMILIES, LEVELS, SPLITS, Question, generate


def record(question: Question) -> dict:
    """A question as JSON; if it has a gap, with the text on both sides of it."""
    made = {"family": question.family, "level": question.level, "prompt": question.prompt, "answers": question.answers}
    gap = {} if question.infill is None else dict(zip(("left", "right"), question.infill, strict=True))
    return made | gap


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = terminal.Parser(prog="python -m specjax.tasks", description="Prints verifiable tasks with their answers.")
    made.add_argument("--family", help=f"one of {', '.join(FAMILIES)}; every one where none is named")
    made.add_argument("--level", type=int, choices=LEVELS, help="difficulty; every one where none is named")
    made.add_argument("--seed", type=int, default=0, help="the same seed gives the same questions")
    made.add_argument("--count", type=int, default=1, help="questions of each family and level")
    made.add_argument("--split", choices=SPLITS, default="held_out", help="which side of the split")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    return made


def show(words: Sequence[str] | None) -> int:
    """Prints the requested questions."""
    chosen = parser().parse_args(words)
    names = list(FAMILIES) if chosen.family is None else [chosen.family]
    levels = LEVELS if chosen.level is None else (chosen.level,)
    for name in names:
        for level in levels:
            with terminal.bad_input():
                questions = generate(name, level, chosen.seed, chosen.count, chosen.split)
            for question in questions:
                plain = f"--- {name}, level {level}\n{question.prompt}\n--> {question.answers[0]}\n\n"
                terminal.write(json.dumps(record(question)) + "\n" if chosen.json else plain)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    return terminal.run_command(lambda: show(words))


if __name__ == "__main__":
    sys.exit(main())
