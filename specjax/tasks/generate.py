"""Questions by family, level and seed, and the endless mixture that a model is trained on."""

import dataclasses
from collections.abc import Iterator, Sequence

from specjax.tasks import families
from specjax.tasks.base import LEVELS, Family, Question, Rng

SPLITS = ("train", "held_out")
FAMILIES: dict[str, Family] = {
    kind.about.name: kind() for kind in vars(families).values() if isinstance(kind, type) and issubclass(kind, Family)
}
"""Every family that `specjax.tasks.families` exports, by name."""
ATTEMPTS = 20_000


def family_of(name: str) -> Family:
    """The family of a name.

    Raises:
      ValueError: on an unknown name.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; choose {', '.join(FAMILIES)}")
    return FAMILIES[name]


def question_of(family: Family, rng: Rng, level: int, held_out: bool) -> Question:
    """The next question of a family on one side of the split."""
    for _ in range(ATTEMPTS):
        content = family.draw(rng, level)
        if family.is_held_out(content) == held_out:
            return family.write(rng, level, content)
    raise RuntimeError(f"{family.name}, level {level}: no {SPLITS[held_out]} question in {ATTEMPTS} draws")


def generate(family: str, level: int, seed: int, count: int, split: str = "held_out") -> list[Question]:
    """Questions with different prompts; a larger count only appends questions.

    Args:
      family: a name of `FAMILIES`.
      level: 1 to 3.
      seed: the same seed gives the same questions on every platform.
      count: how many.
      split: `held_out`, which training never sees, or `train`.

    Raises:
      ValueError: on an unknown family, level or split, on a negative count, or if there are too few questions.
    """
    kind = family_of(family)
    _check_level(level)
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose {', '.join(SPLITS)}")
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    rng = Rng("generate", family, level, seed, split)
    found: dict[str, Question] = {}
    repeats = 0
    while len(found) < count:
        question = question_of(kind, rng, level, split == "held_out")
        repeats += question.prompt in found
        found.setdefault(question.prompt, question)
        if repeats > ATTEMPTS:
            raise ValueError(f"{family}, level {level}: only about {len(found)} {split} questions; ask for fewer")
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The endless mixture of questions for training; each has an index, so training can resume anywhere.

    Attributes:
      seed: the seed of all draws.
      families: names; a name listed twice is drawn twice as often. Empty: each family once.
      levels: the levels, in the same form.

    Raises:
      ValueError: on an unknown family or level.
    """

    seed: int = 0
    families: tuple[str, ...] = ()
    levels: tuple[int, ...] = LEVELS

    def __post_init__(self):
        for name in self.families:
            family_of(name)
        if not self.levels:
            raise ValueError("levels must name at least one level")
        for level in self.levels:
            _check_level(level)

    def __getitem__(self, index: int) -> Question:
        """The question at an index from 0."""
        if index < 0:
            raise IndexError(f"a mixture begins at 0, got {index}")
        rng = Rng("train", self.seed, index)
        family = family_of(rng.choice(self.families or tuple(FAMILIES)))
        return question_of(family, rng, rng.choice(self.levels), held_out=False)

    def stream(self, start: int = 0) -> Iterator[Question]:
        """The endless sequence of questions from an index on."""
        while True:
            yield self[start]
            start += 1


def check(question: Question, text: str) -> bool:
    """Whether a text answers a question.

    Raises:
      ValueError: if the question's family is unknown.
    """
    return family_of(question.family).check(question, text)


def keys(questions: Sequence[Question]) -> set[tuple[str, str]]:
    """The meanings of some questions, each with the family that owns it."""
    return {(family_of(q.family).split_as or q.family, q.key) for q in questions}


def _check_level(level: int) -> None:
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(map(str, LEVELS))}, got {level!r}")
