"""Judging a worked solution: every step holds, or the first wrong step and its correction."""

from specjax.about import About
from specjax.tasks.base import Family, Question, same_words
from specjax.tasks.families.math import THEMES, Content, Equation, Math, applied, steps_of, told, written

ASKS = (
    "{problem}\n Solution: {solution}\n Check every step of the solution.",
    "Here is a problem: {problem}\n A student wrote: {solution}\n Is each step right?",
    "Judge this solution step by step.\n Problem: {problem}\n Solution: {solution}",
    "{problem}\n Somebody answers: {solution}\n Does the answer hold? Go through its steps.",
    "Problem: {problem}\n Worked solution: {solution}\n Find the first mistake, if there is one.",
    "Read the problem and the solution, and say where it goes wrong, if it does.\n {problem}\n {solution}",
    "A pupil was asked: {problem}\n The pupil wrote: {solution}\n Mark it.",
)


class Judge(Family):
    """A problem of the family math with a solution that is right half of the time."""

    about = About("judge", "a worked solution: right, or where it goes wrong", "-")
    split_as = "math"
    asks = "knowledge"

    def draw(self, rng, level) -> Content:
        return Math().draw(rng, level)

    def key(self, content):
        return Math().key(content)

    def write(self, rng, level, content):
        story, question, _ = told(rng, rng.choice(tuple(THEMES)), content)
        steps = steps_of(*content) or ()
        shown, wrong = spoiled(rng, content) if rng.chance(0.5) else (steps, None)
        lines = [f"Step {i}: {written(step)}." for i, step in enumerate(shown, 1)]
        form = rng.integers(len(ASKS))
        solution = f"{' '.join(lines)} The answer is {shown[-1][3]}."
        prompt = ASKS[form].format(problem=f"{story} {question}", solution=solution)
        answer = verdict(steps, wrong)
        label = "right" if wrong is None else f"wrong at step {wrong + 1}"
        return Question(self.name, level, prompt, (answer,), self.key(content), f"ask {form}", given=label)

    def check(self, question, text):
        return same_words(question, text)


def verdict(steps: tuple[Equation, ...], wrong: int | None) -> str:
    """The verdict on a solution, in words.

    >>> verdict(((1, "+", 2, 3), (3, "-", 1, 2)), 1)
    'Step 1 holds: 1 + 2 = 3. Step 2 is wrong: it should be 3 - 1 = 2. The solution goes wrong at step 2.'
    """
    holds = [f"Step {i} holds: {written(step)}." for i, step in enumerate(steps[:wrong], 1)]
    if wrong is None:
        return " ".join([*holds, "The solution is right."])
    last = f"Step {wrong + 1} is wrong: it should be {written(steps[wrong])}."
    return " ".join([*holds, last, f"The solution goes wrong at step {wrong + 1}."])


def spoiled(rng, content: Content) -> tuple[tuple[Equation, ...], int]:
    """A solution that goes wrong and continues with the wrong value, and the index (from 0) of the wrong step."""
    steps, sources = steps_of(*content) or (), sources_of(content)
    for attempt in range(40):
        wrong = rng.integers(len(steps)) if attempt < 20 else len(steps) - 1  # a last step spoils nothing after it
        mistake = mistaken(rng, steps[wrong])
        done = None if mistake is None else _carried(steps, sources, wrong, mistake)
        if done is not None:
            return done, wrong
    a, sign, b, result = steps[-1]
    return (*steps[:-1], (a, sign, b, result + 1)), len(steps) - 1


def mistaken(rng, step: Equation) -> Equation | None:
    """A step with a wrong result, number or sign; None if that gives no other whole number."""
    a, sign, b, result = step
    way = rng.choice(("result", "operand", "sign"))
    if way == "result":
        made = result + rng.choice((-10, -2, -1, 1, 2, 10))
        return (a, sign, b, made) if made >= 0 else None
    if way == "operand":
        b += rng.choice((-2, -1, 1, 2))
    else:
        sign = {"+": "-", "-": "+", "*": "+", "/": "-"}[sign]
    made = applied(a, sign, b) if b > 0 else None
    return None if made is None or made == result else (a, sign, b, made)


def sources_of(content: Content) -> list[tuple[int | None, int | None]]:
    """For every step, the steps whose results its two numbers are; None for a number of the problem."""
    sources: list[tuple[int | None, int | None]] = []
    last = None
    for kind, _, _ in content[1]:
        group = None
        if kind.endswith("_groups"):
            group = len(sources)
            sources.append((None, None))
        sources.append((last, group))
        last = len(sources) - 1
    return sources


def _carried(steps, sources, wrong: int, mistake: Equation) -> tuple[Equation, ...] | None:
    done = [*steps[:wrong], mistake]
    for step, (first, second) in zip(steps[wrong + 1 :], sources[wrong + 1 :], strict=True):
        a = step[0] if first is None else done[first][3]
        b = step[2] if second is None else done[second][3]
        made = applied(a, step[1], b)
        if made is None:
            return None
        done.append((a, step[1], b, made))
    return tuple(done)
