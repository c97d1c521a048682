"""The prompts of a bench: a file's, questions for chat models, and openings of functions for other models."""

import itertools
from typing import Any

from specjax.bench.options import BenchOptions
from specjax.bench.stdlib import heldout_functions
from specjax.jobs import jsonl
from specjax.serve.text import user_turn
from specjax.tasks import FAMILIES, generate
from specjax.tasks.generate import family_of

LEVEL, SEED = 2, 0
"""The level and seed of the questions, which are held out from training."""


def read_input(options: BenchOptions) -> list[jsonl.Line] | None:
    """The lines of `--input`; None without it.

    Raises:
      ValueError: if a line is not a prompt, there is no line, or a family of `--tasks` is unknown.
    """
    if options.tasks and options.input:
        raise ValueError("give --tasks or --input, not both")
    for name in _families(options):
        family_of(name)
    if not options.input:
        return None
    lines = list(itertools.islice(jsonl.read(options.input), options.prompts))
    bad = [line for line in lines if line.error]
    if bad or not lines:
        why = f"line {bad[0].number}: {bad[0].error}" if bad else "it has no valid line"
        raise ValueError(f"{options.input}: {why}")
    return lines


def prompts_of(lines: list[jsonl.Line] | None, options: BenchOptions, model: Any) -> tuple[list[Any], list[Any]]:
    """Prompts, and the text after each new text (None: nothing).

    Args:
      lines: see `read_input`.
      options: give the number and the families of prompts.
      model: the model to be asked.
    """
    if lines is not None:
        return [line.prompt for line in lines], [line.suffix for line in lines]
    if options.tasks or getattr(model.tokenizer, "chat_template", None):
        texts = questions(options.prompts, _families(options))
    else:
        texts = list(heldout_functions(options.prompts))
    return texts, [None] * len(texts)


def _families(options: BenchOptions) -> list[str]:
    return options.tasks.split(",") if options.tasks else list(FAMILIES)


def questions(count: int, families: list[str]) -> list[Any]:
    """Questions as chat messages, with families in turn."""
    each = -(-count // len(families))
    asked = [generate(family, LEVEL, SEED, each) for family in families]
    return [user_turn(turn[i].prompt, chat=True) for i in range(each) for turn in asked][:count]
