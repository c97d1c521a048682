"""The questions: shipped tasks by family, level and seed, or the user's own; each with its checker."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from specjax import tasks
from specjax.evaluate.options import LIMIT, EvalOptions
from specjax.jobs import jsonl
from specjax.tasks.base import Asks, words_of
from specjax.tasks.generate import family_of

OWN = "own"
"""The family of questions without one."""
OF_QUESTIONS = ("answer", "answers", "family", "asks")
"""Fields that lines of questions have beside those of prompts."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A question as decoders get it.

    Attributes:
      id: its name; it decides the noise together with the seed.
      family: the family in which its answer counts.
      prompt: text, token ids or chat messages.
      right: a function that says whether a text answers it.
      suffix: the text after the answer, for models that fill in, or None.
      options: options of its request only.
      gap: the text before a gap, in it and after it; None if the question has no gap.
      constraint: the form that it asks for; None for none.
      obeys: a function that says whether a text has this form, or None.
      asks: where the answer is, `knowledge` or `copying` (`specjax.tasks.Family.asks`); None if that is not said.
    """

    id: str
    family: str
    prompt: Any
    right: Callable[[str], bool]
    suffix: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gap: tuple[str, str, str] | None = None
    constraint: Any = None
    obeys: Callable[[str], bool | None] = lambda text: None
    asks: Asks | None = None


@dataclasses.dataclass(frozen=True)
class QuestionLine(jsonl.Line):
    """A line with answers.

    Attributes:
      answers: the right answers.
      family: as given.
      asks: as given.
    """

    answers: tuple[str, ...] = ()
    family: str = OWN
    asks: Asks | None = None


def items_of(options: EvalOptions) -> list[Item]:
    """The questions, with families in turn, so that every part is a fair sample.

    Raises:
      ValueError: on an unknown family, too high a limit, unusable questions, or no questions.
    """
    names = list(dict.fromkeys(name.strip() for text in options.families for name in text.split(",") if name.strip()))
    if options.questions is None:
        count = LIMIT if options.limit is None else options.limit
        groups = [_shipped(name, options.level, options.seed, count) for name in names or tasks.FAMILIES]
    else:
        groups = _grouped(own_questions(options.questions), names, options.limit)
    items = [item for turn in itertools.zip_longest(*groups) for item in turn if item is not None]
    if options.infill and not any(item.gap for item in items):
        raise ValueError("infill is for questions with a gap, such as those of the family fill, and there are none")
    return items


def _shipped(family: str, level: int, seed: int, count: int) -> list[Item]:
    checker = family_of(family)
    return [
        Item(
            f"{family}-{level}-{seed}-{index}",
            family,
            tasks.messages(question),
            functools.partial(checker.check, question),
            gap=question.infill and (question.infill[0], question.answers[0], question.infill[1]),
            constraint=checker.constraint(question),
            obeys=functools.partial(checker.obeys, question),
            asks=checker.asks,
        )
        for index, question in enumerate(tasks.generate(family, level, seed, count))
    ]


def _grouped(items: list[Item], names: list[str], limit: int | None) -> list[list[Item]]:
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.family, []).append(item)
    unknown = [name for name in names if name not in groups]
    if unknown:
        raise ValueError(f"there are no questions of the family {unknown[0]!r}; choose {', '.join(groups)}")
    return [groups[name][:limit] for name in names or groups]


def own_questions(given: "str | os.PathLike[str] | Iterable[Mapping[str, Any]]") -> list[Item]:
    """The user's questions. A text is right if it equals one of the answers, up to white space.

    Args:
      given: a file of JSON lines, or objects like its lines: `prompt` (text or token ids) or `messages`, `answer` or
        `answers`, and optionally `family`, `asks`, `id`, `suffix` and generation options.

    Raises:
      ValueError: on an unusable line (the first is named), on a repeated id, or if there is no line.
    """
    if isinstance(given, (str, os.PathLike)):
        what, lines = str(given), jsonl.read(given, question_line)
    else:
        what, lines = "questions", [question_line(number, dict(one)) for number, one in enumerate(given, start=1)]
    items: dict[str, Item] = {}
    for line in lines:
        item = _own(what, line)
        if item.id in items:
            raise ValueError(f"{what}, line {line.number}: another question has the id {item.id!r}")
        items[item.id] = item
    if not items:
        raise ValueError(f"{what} holds no question")
    return list(items.values())


def question_line(number: int, content: dict[str, Any]) -> jsonl.Line:
    """A line from an object; see `own_questions`."""
    content = {key: value for key, value in content.items() if value is not None}
    rest = {key: value for key, value in content.items() if key not in OF_QUESTIONS}
    line = jsonl.from_object(number, rest)
    answers, family = content.get("answers", content.get("answer")), content.get("family", OWN)
    asks = content.get("asks")
    answers = [answers] if isinstance(answers, str) else answers
    error = line.error
    if "answer" in content and "answers" in content:
        error = "it has both answer and answers: leave one out"
    elif not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        error = error or "answer must be a string, or answers a list of strings"
    elif not isinstance(family, str) or not family:
        error = error or "family must be a string that is not empty"
    elif asks is not None and asks not in get_args(Asks):
        error = error or f"asks must be {' or '.join(get_args(Asks))}, not {asks!r}"
    elif line.unknown:
        error = error or f"it has no field {line.unknown[0]!r}"
    fields = vars(line) | {"error": error}
    if error:
        return QuestionLine(**fields)
    return QuestionLine(**fields, answers=tuple(answers or ()), family=family, asks=asks)


def _own(what: str, line: jsonl.Line) -> Item:
    if line.error is not None or not isinstance(line, QuestionLine):
        raise ValueError(f"{what}, line {line.number}: {line.error}")
    right = functools.partial(same_words, line.answers)
    name = f"line-{line.number}" if line.id is None or line.id == "" else str(line.id)
    return Item(name, line.family, line.prompt, right, line.suffix, line.options, asks=line.asks)


def same_words(answers: Sequence[str], text: str) -> bool:
    """Whether a text is one of the answers, up to white space.

    >>> same_words(("four", "4"), " 4\\n")
    True
    """
    return words_of(text) in map(words_of, answers)
