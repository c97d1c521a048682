"""Spec-Bench (Xia et al. 2024, arXiv:2401.07851): its questions, answers and measures.

There are 480 questions in six tasks. Every question of the first task has a second turn, which is asked after the
model's own answer to the first. The clock covers a turn, with prefill and without compilation. The questions are read
from a file of the user's.
"""

import dataclasses
import json
import statistics
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TURNS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""MT-Bench's categories, which form one task."""
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclasses.dataclass(frozen=True)
class Question:
    """A line of the file; `turns` are the user's messages."""

    id: Any
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        return TASKS[0] if self.category in TURNS else self.category


@dataclasses.dataclass(frozen=True)
class Turn:
    """The answer to one turn.

    Attributes:
      text: the written text.
      steps: the number of target passes; 0 if unknown, as a peer's are.
      new_tokens: the number of new tokens.
      seconds: wall time; rows decoded together have equal shares.
      accepted: how many steps wrote 1, 2, 3 ... tokens.
    """

    text: str
    steps: int
    new_tokens: int
    seconds: float
    accepted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """A question and the turns of its answer, which are fewer than its own if one left no room for the next."""

    question: Question
    turns: tuple[Turn, ...]


def read(path: str | Path, most: int) -> list[Question]:
    """The questions of a file in order, at most `most` per task.

    Raises:
      ValueError: naming the first line that is not a question, or if there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read the questions {str(path)!r}: {reason}") from error
    questions, taken = [], dict.fromkeys(TASKS, 0)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            question = _question(f"{path}, line {number}", line)
            taken[question.task] += 1
            if taken[question.task] <= most:
                questions.append(question)
    if not questions:
        raise ValueError(f"{path} has no question")
    return questions


def _question(where: str, line: str) -> Question:
    try:
        content = json.loads(line)
        question = Question(content["question_id"], str(content["category"]), tuple(content["turns"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a question with question_id, category and turns ({error})") from error
    if not question.turns or not all(isinstance(turn, str) and turn.strip() for turn in question.turns):
        raise ValueError(f"{where}: turns must be texts, at least one")
    if question.task not in TASKS:
        known = ", ".join((*TURNS, *TASKS[1:]))
        raise ValueError(f"{where}: unknown category {question.category!r}; there are {known}")
    return question


@dataclasses.dataclass(frozen=True)
class Measure:
    """A decoder's measures in one task, or in all.

    Attributes:
      questions: the number of questions.
      mean_accepted: tokens per target pass, over all passes (MAT; plain decoding has 1); None if passes are unknown.
      tokens_per_second: tokens over seconds, averaged over questions.
      speedup: the speed relative to plain decoding.
    """

    questions: int
    mean_accepted: float | None
    tokens_per_second: float
    speedup: float


def measure(rounds: Sequence[Sequence[Answer]], plain: Sequence[Sequence[Answer]]) -> dict[str, Measure]:
    """A decoder's measures by task, and under `overall` for all tasks: means over the rounds, in which plain decoding
    took part."""
    found = {}
    for name in (*TASKS, "overall"):
        own, base = ([_of(name, answers) for answers in each] for each in (rounds, plain))
        if own[0]:
            speed, other = (statistics.fmean(map(_speed, each)) for each in (own, base))
            found[name] = Measure(len(own[0]), _accepted(own[0]), round(speed, 2), round(speed / other, 4))
    return found


def deviation(rounds: Sequence[Sequence[Answer]]) -> float:
    """The standard deviation of the rounds' overall speed in tokens per second; 0 for one round."""
    return round(statistics.stdev(map(_speed, rounds)), 2) if len(rounds) > 1 else 0.0


def same_texts(ours: Sequence[Answer], plain: Sequence[Answer]) -> int:
    """The number of questions with identical answers."""
    texts = lambda answer: [turn.text for turn in answer.turns]
    return sum(texts(a) == texts(b) for a, b in zip(ours, plain, strict=True))


def _of(task: str, answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if task in ("overall", answer.question.task)]


def _speed(answers: Sequence[Answer]) -> float:
    ratios = (sum(t.new_tokens for t in a.turns) / sum(t.seconds for t in a.turns) for a in answers)
    return statistics.fmean(ratios)


def _accepted(answers: Sequence[Answer]) -> float | None:
    turns = [turn for answer in answers for turn in answer.turns]
    steps = sum(turn.steps for turn in turns)
    return round(sum(turn.new_tokens for turn in turns) / steps, 4) if steps else None


def answer_lines(answers: Sequence[Answer], model: str, now: Callable[[], float]) -> Iterable[str]:
    """The lines that Spec-Bench's own scripts read. Acceptance lengths are sorted by size, not by time."""
    for answer in answers:
        lengths = [size + 1 for turn in answer.turns for size, count in enumerate(turn.accepted) for _ in range(count)]
        choice = {
            "index": 0,
            "turns": [turn.text for turn in answer.turns],
            "decoding_steps": [turn.steps for turn in answer.turns],
            "new_tokens": [turn.new_tokens for turn in answer.turns],
            "wall_time": [turn.seconds for turn in answer.turns],
            "accept_lengths": lengths,
        }
        line = {"question_id": answer.question.id, "category": answer.question.category, "answer_id": uuid.uuid4().hex}
        yield json.dumps({**line, "model_id": model, "choices": [choice], "tstamp": now()})


def label(decoder: str) -> str:
    """A row's decoder in Markdown: ours as code, a peer in words.

    >>> label("draft"), label("transformers greedy")
    ('`draft`', 'transformers, greedy')
    """
    return decoder.replace(" ", ", ", 1) if " " in decoder else f"`{decoder}`"


def overview(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The lines of a table over all questions, from the rows of `--json`: tokens per step, speed, and its ratios to plain
    decoding and to the best mode of each peer. A file as it is stored is another model, and no such mode."""
    speed = {row["decoder"]: row["overall"]["tokens_per_second"] for row in rows}
    best: dict[str, float] = {}
    for decoder, own in speed.items():
        peer, mode, _ = decoder.partition(" ")
        if mode and "stored" not in decoder:
            best[peer] = max(best.get(peer, 0.0), own)
    ratios = "ratio to plain", *(f"to the best of {peer}" for peer in best)
    yield "decoder", "tokens per step", "tokens/s", *ratios, "plain's texts"
    for row in rows:
        own, steps, same = speed[row["decoder"]], row["overall"]["mean_accepted"], row["identical_texts"]
        yield (
            label(row["decoder"]),
            "" if steps is None else f"{steps:.2f}",
            f"{own:.1f}",
            *(f"{own / other:.2f}" for other in (speed["none"], *best.values())),
            "" if same is None else f"{same} of {row['overall']['questions']}",
        )
