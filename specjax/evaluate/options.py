"""The options of `specjax eval`."""

import dataclasses
from typing import Any

from specjax.serve.options import DecodeOptions, ModelOptions, PromptOptions, RunOptions, option, same
from specjax.tasks import FAMILIES, LEVELS

LIMIT = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOptions(PromptOptions, DecodeOptions, ModelOptions):
    """A model and how it answers: the options in which two decoders may differ."""

    seed: int = option(0, "", hidden=True)
    num_return_sequences: int = option(
        1, "completions per question, of which --select takes one as the answer", metavar="N", least=1
    )
    select: str | None = same(RunOptions, "select")
    task_constraint: bool = option(
        False, "every text has the form that its question asks for (family json: the keys and types)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(DecoderOptions):
    """The options of `specjax eval`; see the help of each. In Python, `questions` may also be a list
    (`specjax.evaluate.questions.own_questions`)."""

    seed: int = option(0, "decides the questions and the noise")
    families: tuple[str, ...] = option((), f"some of {', '.join(FAMILIES)} (default: all)", metavar="A,B,...")
    level: int = option(2, "difficulty of the questions", choices=LEVELS)
    limit: int | None = option(
        None, f"questions per family (default: {LIMIT}; with --questions all)", metavar="N", least=1
    )
    questions: Any = option(
        None,
        "your own questions instead of the shipped tasks: lines of {prompt or messages, answer or answers, optionally family, "
        "asks, id, suffix and generation options}",
        metavar="FILE.jsonl",
    )
    samples: int = option(1, "answers drawn for each question", metavar="N", least=1)
    infill: bool = option(
        False, "a diffusion model fills a question's gap, made as long as the answer, if there is one"
    )
    uncertainty: bool = option(False, "also report how well negative log-likelihood predicts wrong answers (AUROC)")
    trust: bool = option(
        False,
        "also report how far the compared models are from the first: texts that change, divergence by token, calibration, "
        "and knowledge against copying",
    )
    batch_size: int = same(RunOptions, "batch_size")
    compare: tuple[str, ...] = option(
        (),
        "another decoder on the same questions: the options that differ; may be repeated",
        metavar="OPTION=VALUE;...",
    )
    baseline: str | None = option(
        None, "compare with the --answers of another run on the same questions", metavar="FILE.jsonl"
    )
    margin: float = option(1.0, "most points of accuracy that a decoder called free may cost", metavar="POINTS")
    answers: str | None = option(None, "write the answers to this new file", metavar="FILE.jsonl")
    plot: str | None = option(None, "write a picture of accuracy against speed", metavar="FILE.png")
    json: bool = option(False, "print one line of JSON")
