"""The results of decoders: answers, a row for each decoder, and comparisons."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.evaluate.statistics import Auroc, Paired, auroc, paired, verdict, wilson
from specjax.jobs import jsonl


@dataclasses.dataclass(frozen=True)
class Answer:
    """A decoder's answer to a question; a line of the file of answers.

    Attributes:
      decoder: its name.
      id: the question's.
      family: the question's.
      prompt: as asked.
      text: the answer.
      right: whether it is right.
      tokens: the number of tokens.
      steps: the number of target passes; if it was selected from several completions, the passes of all of them.
      finish_reason: eos, stop, length or error.
      sample: its number among a question's answers, from 0.
      nll: the negative log-likelihood of its tokens, in nats; None if it was not kept.
      obeys: whether it has the form that the question asks for; None if that asks for none.
    """

    decoder: str
    id: str
    family: str
    prompt: Any
    text: str
    right: bool
    tokens: int
    steps: int
    finish_reason: str
    sample: int = 0
    nll: float | None = None
    obeys: bool | None = None


@dataclasses.dataclass(frozen=True)
class Share:
    """An accuracy with its 95% interval.

    Attributes:
      accuracy: the share of right samples, averaged over questions.
      low: lower end.
      high: upper end.
      n: the number of questions.
    """

    accuracy: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of answers.

    Attributes:
      tokens: new tokens, including the end of a text.
      steps: target passes, summed over rows.
      seconds: wall time, prefill included.
      decode_seconds: the time of decoding steps only.
    """

    tokens: int
    steps: int
    seconds: float
    decode_seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one decoder.

    Attributes:
      decoder: its name.
      families: accuracy by family.
      overall: accuracy over all questions.
      cost: of all answers.
      answers: all of them, by question and sample.
    """

    decoder: str
    families: dict[str, Share]
    overall: Share
    cost: Cost
    answers: list[Answer]

    @property
    def tokens_per_step(self) -> float:
        return self.cost.tokens / max(self.cost.steps, 1)

    @property
    def steps_per_answer(self) -> float:
        return self.cost.steps / len(self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.cost.tokens / self.cost.seconds

    @property
    def auroc(self) -> Auroc | None:
        """How well `nll` separates wrong answers from right ones; None if it was not kept, or if all are right or all
        wrong."""
        wrong = [not answer.right for answer in self.answers if answer.nll is not None]
        if len(wrong) < len(self.answers) or len(set(wrong)) < 2:
            return None
        return auroc(np.asarray([answer.nll for answer in self.answers]), np.asarray(wrong))

    @property
    def compliance(self) -> Share | None:
        """The share of answers that have the form which their question asks for; None if no question does."""
        asked = [answer for answer in self.answers if answer.obeys is not None]
        samples = 1 + max((answer.sample for answer in asked), default=0)
        return share_of(shares_of(asked, lambda answer: bool(answer.obeys)), samples) if asked else None

    def count(self, reason: str) -> int:
        """The number of answers with a finish reason."""
        return sum(answer.finish_reason == reason for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object, without its answers."""
        return {
            "families": {name: rounded(dataclasses.asdict(share)) for name, share in self.families.items()},
            **rounded(dataclasses.asdict(self.overall)),
            "tokens_per_step": round(self.tokens_per_step, 4),
            "steps_per_answer": round(self.steps_per_answer, 2),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "decode_tokens_per_second": round(self.cost.tokens / max(self.cost.decode_seconds, 1e-9), 2),
            "answers": len(self.answers),
            "unfinished": self.count("length"),
            "failed": self.count("error"),
            "decoder": self.decoder,
            **({} if (form := self.compliance) is None else {"compliance": rounded(dataclasses.asdict(form))}),
            **({} if (found := self.auroc) is None else {"auroc": rounded(dataclasses.asdict(found))}),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A decoder compared with another on the same questions.

    Attributes:
      decoder: its name.
      baseline: the other's name.
      overall: the difference of accuracy over all questions.
      families: the difference by family.
      speed: the ratio of their tokens per second in one run; None if the other's answers come from another run.
      same_text: the number of answers with the same text.
      answers: the number of answers of each.
      verdict: whether accuracy was lost, in words.
    """

    decoder: str
    baseline: str
    overall: Paired
    families: dict[str, Paired]
    speed: float | None
    same_text: int
    answers: int
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {
            "decoder": self.decoder,
            "baseline": self.baseline,
            **rounded(dataclasses.asdict(self.overall)),
            "speed": self.speed and round(self.speed, 4),
            "same_text": self.same_text,
            "answers": self.answers,
            "verdict": self.verdict,
            "families": {name: rounded(dataclasses.asdict(found)) for name, found in self.families.items()},
        }


def row_of(decoder: str, answers: Sequence[Answer], cost: Cost) -> Row:
    """A row from a decoder's answers and their cost."""
    samples = 1 + max(answer.sample for answer in answers)
    families = {name: share_of(shares_of(own), samples) for name, own in _split(answers)}
    return Row(decoder, families, share_of(shares_of(answers), samples), cost, list(answers))


def compared(
    name: str, baseline: str, first: Sequence[Answer], second: Sequence[Answer], speed: float | None, margin: float
) -> Comparison:
    """Compares two decoders' answers to the same questions.

    Args:
      name: the name of the second decoder.
      baseline: the name of the first.
      first: the first decoder's answers.
      second: the second's answers to the same questions, with the same number of samples and in the same order.
      speed: the second's speed as a multiple of the first's, or None.
      margin: see `specjax.evaluate.statistics.verdict`.
    """
    overall = paired(shares_of(first), shares_of(second))
    families = {
        family: paired(shares_of(before), shares_of(after))
        for (family, before), (_, after) in zip(_split(first), _split(second), strict=True)
    }
    same = sum(a.text == b.text for a, b in zip(first, second, strict=True))
    said = verdict(overall, same == len(first), margin)
    return Comparison(name, baseline, overall, families, speed, same, len(first), said)


def shares_of(answers: Sequence[Answer], of: Callable[[Answer], bool] = lambda answer: answer.right) -> np.ndarray:
    """The share of right answers of every question, `[Q]`, or of those for which `of` holds."""
    right: dict[str, list[bool]] = {}
    for answer in answers:
        right.setdefault(answer.id, []).append(of(answer))
    return np.asarray([np.mean(own) for own in right.values()])


def read_answers(path: str, asked: Sequence[tuple[str, int, Any]]) -> list[Answer]:
    """The answers of another run to the same questions; if it had several decoders, the first one's.

    Args:
      path: the file of answers that a run wrote.
      asked: id, sample and prompt of every answer, in order.

    Raises:
      ValueError: if it is not such a file, or has other questions.
    """
    found: dict[tuple[str, int], Answer] = {}
    decoder = None
    for line in jsonl.read(path, _answer_line):
        answer = line.prompt
        if line.error is not None or not isinstance(answer, Answer):
            raise ValueError(f"{path}, line {line.number}: {line.error}")
        decoder = answer.decoder if decoder is None else decoder
        if answer.decoder == decoder:
            found[answer.id, answer.sample] = answer
    missing = [name for name, sample, prompt in asked if not _same_prompt(found.get((name, sample)), prompt)]
    if missing or len(found) != len(asked):
        which = f"{missing[0]!r} is not among them" if missing else f"{len(found)} answers against {len(asked)}"
        raise ValueError(
            f"the answers in {path!r} are to other questions ({which}): use the same questions, families, level, limit, seed "
            "and samples in both runs"
        )
    return [found[name, sample] for name, sample, _ in asked]


def _same_prompt(answer: Answer | None, prompt: Any) -> bool:
    return answer is not None and answer.prompt == prompt


def _answer_line(number: int, content: dict[str, Any]) -> jsonl.Line:
    names = [field.name for field in dataclasses.fields(Answer) if field.name in content]
    needed = {field.name for field in dataclasses.fields(Answer) if field.default is dataclasses.MISSING}
    if needed - set(names) or not isinstance(content["right"], bool) or not isinstance(content["text"], str):
        return jsonl.Line(number, error="it is no answer of `specjax eval --answers`")
    return jsonl.Line(number, Answer(**{name: content[name] for name in names}))


def _split(answers: Sequence[Answer]) -> list[tuple[str, list[Answer]]]:
    """Answers by family, in the order in which families first occur."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.family, []).append(answer)
    return list(groups.items())


def share_of(shares: np.ndarray, samples: int) -> Share:
    """An accuracy with its interval, from the shares `[Q]` of every question's right samples."""
    return Share(float(np.mean(shares)), *wilson(shares, samples), len(shares))


def rounded(fields: dict[str, Any]) -> dict[str, Any]:
    """A JSON object whose numbers have four digits, in inner objects too."""
    short = lambda value: float(f"{value:.4g}") if isinstance(value, float) else value
    return {name: rounded(value) if isinstance(value, dict) else short(value) for name, value in fields.items()}
