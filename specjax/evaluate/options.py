"""What `specjax eval` was asked for."""

import dataclasses
from typing import Any

from specjax.serve.options import DecodeOptions, ModelOptions, PromptOptions, RunOptions, option, same
from specjax.tasks import FAMILIES, LEVELS

LIMIT = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOptions(PromptOptions, DecodeOptions, ModelOptions):
    """A model and how it answers: what two decoders may differ in."""

    seed: int = option(0, "", hidden=True)
    num_return_sequences: int = option(
        1, "completions of a question that --select takes one of, which is the answer", metavar="N", least=1
    )
    select: str | None = same(RunOptions, "select")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(DecoderOptions):
    """See the help of each. In Python `questions` may also be a list, see `specjax.evaluate.questions.own_questions`."""

    seed: int = option(0, "decides the questions, and with them the noise")
    families: tuple[str, ...] = option((), f"of {', '.join(FAMILIES)} (default: all)", metavar="A,B,...")
    level: int = option(2, "difficulty of the questions", choices=LEVELS)
    limit: int | None = option(None, f"questions a family (default: {LIMIT}; of --questions all)", metavar="N", least=1)
    questions: Any = option(
        None,
        "your own, in place of the shipped tasks: lines of {prompt or messages, answer or answers, optionally family, id, "
        "suffix and generation options}",
        metavar="FILE.jsonl",
    )
    samples: int = option(1, "answers to each question, where they are drawn", metavar="N", least=1)
    infill: bool = option(
        False, "a diffusion model fills gaps of the length of their answers, where a question has one"
    )
    uncertainty: bool = option(False, "also how well an answer's negative log-likelihood says that it is wrong (AUROC)")
    batch_size: int = same(RunOptions, "batch_size")
    compare: tuple[str, ...] = option(
        (), "another decoder for the same questions, by what is different; may be repeated", metavar="OPTION=VALUE;..."
    )
    baseline: str | None = option(
        None, "compare with the --answers of another run, which had the same questions", metavar="FILE.jsonl"
    )
    margin: float = option(1.0, "points of accuracy that what is called free may cost at most", metavar="POINTS")
    answers: str | None = option(None, "a new file for the answers", metavar="FILE.jsonl")
    plot: str | None = option(None, "write a picture of accuracy against speed", metavar="FILE.png")
    json: bool = option(False, "print one line of JSON")
