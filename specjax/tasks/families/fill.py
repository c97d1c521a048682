"""Latin squares, and gaps whose content is decided by the text after them."""

from typing import Any

from specjax.about import About
from specjax.tasks.base import Family, Question, same_words
from specjax.tasks.words import ANIMALS, COLORS, FRUITS, NAMES, PLACES, THINGS

ORDERS = {1: 4, 2: 4, 3: 5}
HOLES = {1: 4, 2: 7, 3: 12}
TERMS = {1: (7, 9), 2: (8, 11), 3: (11, 15)}
WORDS = {1: (4, 7), 2: (6, 10), 3: (10, 15)}
EVENTS = {1: (2, 3), 2: (3, 4), 3: (5, 7)}
SYMBOLS = (
    tuple("ABCDEF"),
    tuple("123456"),
    tuple("pqrstu"),
    COLORS[:6],
    ("north", "south", "east", "west", "up", "down"),
)
SQUARES = (
    "Every row and every column has each of {symbols} once. Fill in the square: {square}",
    "Complete this latin square of {symbols}, with each once in a row and in a column.\n {square}",
    "{square}\n Put {symbols} in place of the blanks; no row and no column has one twice.",
    "A latin square of {symbols} has holes: {square} Write it without.",
    "Square: {square}\n Replace each _ so that all rows and columns hold {symbols}.",
    "Solve the square of {symbols}, where rows and columns repeat nothing. {square}",
)
GAPS = (
    "Fill the gap ____ and write only what belongs there.\n {text}",
    "{text}\n What belongs in the place of ____ here?",
    "Something is missing at ____ in this text. Write it.\n {text}",
    "Text with a gap: {text}\n The gap:",
    "Look at what comes after ____ and write what belongs there. {text}",
    "Which words were removed at ____ in the following? {text}",
)
KINDS = ("square", "sequence", "mirror", "summary")


class Fill(Family):
    """A latin square, a sequence that its end decides, the mirror of what follows, or the events that a summary names."""

    about = About("fill", "latin squares, and gaps whose right side decides", "-")
    asks = "copying"

    def draw(self, rng, level) -> tuple[str, Any]:
        kind = rng.choice(KINDS)
        return kind, {"square": _square, "sequence": _sequence, "mirror": _mirror, "summary": _summary}[kind](
            rng, level
        )

    def key(self, content):
        return f"{content[0]} {content[1]}"

    def write(self, rng, level, content):
        kind, about = content
        if kind == "square":
            prompt, answer = _holes(rng, about, HOLES[level])
            return Question(self.name, level, prompt, (answer,), self.key(content), kind)
        left, answer, right = {"sequence": _numbers, "mirror": _mirrored, "summary": _told}[kind](about)
        form = rng.integers(len(GAPS))
        prompt = GAPS[form].format(text=f"{left} ____ {right}")
        return Question(self.name, level, prompt, (answer,), self.key(content), f"{kind}-{form}", infill=(left, right))

    def check(self, question, text):
        return same_words(question, text)


def _square(rng, level: int) -> tuple[tuple[int, ...], ...]:
    n = ORDERS[level]
    rows, columns, names = rng.permutation(n), rng.permutation(n), rng.permutation(n)
    return tuple(tuple(names[(row + column) % n] for column in columns) for row in rows)


def _holes(rng, square, most: int) -> tuple[str, str]:
    n, symbols = len(square), rng.choice(SYMBOLS)[: len(square)]
    holes: set[tuple[int, int]] = set()
    for cell in rng.shuffled([(i, j) for i in range(n) for j in range(n)]):
        if len(holes) < most and solvable(square, holes | {cell}):
            holes.add(cell)

    def written(holes):
        rows = (" ".join("_" if (i, j) in holes else symbols[square[i][j]] for j in range(n)) for i in range(n))
        return " / ".join(rows)

    return rng.choice(SQUARES).format(symbols=" ".join(symbols), square=written(holes)), written(())


def solvable(square: tuple[tuple[int, ...], ...], holes: set[tuple[int, int]]) -> bool:
    """Whether the holes can be filled one by one, each from its row and column; the solution is then unique."""
    n, left = len(square), set(holes)
    while left:
        sure = {
            (i, j)
            for i, j in left
            if len(
                {square[i][k] for k in range(n) if (i, k) not in left}
                | {square[k][j] for k in range(n) if (k, j) not in left}
            )
            == n - 1
        }
        if not sure:
            return False
        left -= sure
    return True


def _sequence(rng, level: int) -> tuple[int, ...]:
    """Numbers with a repeating step, or at level 3 two alternating steps."""
    steps = [rng.integers(1, 10) for _ in range(2 if level == 3 else 1)]
    if len({*steps}) < len(steps):
        steps[0] += 1
    start, down = rng.integers(1, 30), rng.chance(0.3)
    values = [start]
    for i in range(rng.integers(*TERMS[level])):
        values.append(values[-1] + steps[i % len(steps)])
    return tuple(values[::-1] if down else values)


def _numbers(values: tuple[int, ...]) -> tuple[str, str, str]:
    words = [f"{value}," for value in values]
    return f"Steps that repeat: {words[0]}", " ".join(words[1:-3]), " ".join(words[-3:]).rstrip(",") + "."


def _mirror(rng, level: int) -> tuple[str, ...]:
    return tuple(rng.sample(NAMES + FRUITS + THINGS, rng.integers(*WORDS[level])))


def _mirrored(words: tuple[str, ...]) -> tuple[str, str, str]:
    return "It reads the same from both ends:", " ".join(words[::-1]), f"; {' '.join(words)}."


def _summary(rng, level: int) -> tuple[tuple[str, str], ...]:
    count = rng.integers(*EVENTS[level])
    return tuple(zip(rng.sample(ANIMALS, count), (rng.choice(PLACES) for _ in range(count)), strict=True))


def _told(events: tuple[tuple[str, str], ...]) -> tuple[str, str, str]:
    first = [f"{'First' if i == 0 else 'Then'} the {who} went to the {where}." for i, (who, where) in enumerate(events)]
    short = [f"the {who} in the {where}" for who, where in events]
    return "It was a long day.", " ".join(first), f"In the end we saw {', '.join(short[:-1])} and {short[-1]}."
