"""Arithmetic word problems with worked steps; every step is checked."""

import re

from specjax.about import About
from specjax.tasks.base import Family, Question
from specjax.tasks.words import ANIMALS, FRUITS, NAMES, THINGS

Equation = tuple[int, str, int, int]
Content = tuple[int, tuple[tuple[str, int, int], ...]]
EVENTS = {1: (1, 2), 2: (2, 3), 3: (4, 5)}
CAPS = {1: 30, 2: 50, 3: 99}
"""The largest number: carries over more digits stall small models."""

KINDS = ("gain", "lose", "gain_groups", "lose_groups", "times", "share")
THEMES: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "owner": (
        "{name} has {start} {items}.",
        "How many {items} does {name} have now?",
        {
            "gain": ("{name} finds {a} more.", "A friend gives {name} {a} more.", "Then {name} buys {a} more."),
            "lose": ("{name} loses {a} of them.", "{name} gives away {a} of them.", "{name} sells {a} of them."),
            "gain_groups": ("{name} buys {a} boxes of {b} each.", "{name} gets {a} bags with {b} in each."),
            "lose_groups": ("{name} gives {b} to each of {a} friends.", "{name} sells {a} packs of {b} each."),
            "times": ("After a while {name} has {a} times as many.", "A prize makes it {a} times as many."),
            "share": ("{name} shares them equally among {a} people and keeps one share.",),
        },
    ),
    "shop": (
        "There are {start} {items} on a shelf in the shop.",
        "How many {items} are on the shelf at the end?",
        {
            "gain": ("The owner puts {a} more on it.", "In the morning {a} more come in."),
            "lose": ("A customer buys {a}.", "The owner takes {a} away.", "By noon {a} are sold."),
            "gain_groups": ("A truck brings {a} boxes of {b} each.", "The owner adds {a} rows of {b} each."),
            "lose_groups": ("Then {a} customers buy {b} each.", "The owner returns {a} boxes of {b} each."),
            "times": ("A big delivery makes it {a} times as many.",),
            "share": ("They are spread equally over {a} shelves, and we look at one of them.",),
        },
    ),
    "bus": (
        "A train leaves with {start} people on it.",
        "How many people are on the train now?",
        {
            "gain": ("At the next stop {a} people get on.", "Then {a} more people come in."),
            "lose": ("At the next stop {a} people get off.", "Then {a} people leave."),
            "gain_groups": ("Then {a} families of {b} people get on.",),
            "lose_groups": ("Then {a} groups of {b} people get off.",),
            "times": ("In the city the number of people becomes {a} times as large.",),
            "share": ("The train is split into {a} equal parts, and we follow one part.",),
        },
    ),
    "farm": (
        "A farmer counts {start} {animals} in the field.",
        "How many {animals} are in the field in the end?",
        {
            "gain": ("Overnight {a} more come.", "A neighbor brings {a} more."),
            "lose": ("Then {a} run away.", "The farmer sells {a}."),
            "gain_groups": ("Then {a} carts with {b} in each arrive.",),
            "lose_groups": ("Then {a} neighbors take {b} each.",),
            "times": ("A year later there are {a} times as many.",),
            "share": ("They are put into {a} equal fields, and the farmer looks at one.",),
        },
    ),
    "counter": (
        "A counter shows {start}.",
        "What does the counter show?",
        {
            "gain": ("It goes up by {a}.", "Add {a}."),
            "lose": ("It goes down by {a}.", "Subtract {a}."),
            "gain_groups": ("It goes up by {b}, {a} times.", "Add {a} times {b}."),
            "lose_groups": ("It goes down by {b}, {a} times.", "Subtract {a} times {b}."),
            "times": ("Multiply it by {a}.", "It becomes {a} times as much."),
            "share": ("Divide it by {a}.", "It is cut into {a} equal parts, and it shows one."),
        },
    ),
    "game": (
        "{name} starts a game with {start} points.",
        "How many points does {name} have after the game?",
        {
            "gain": ("{name} wins {a} points.", "A lucky card gives {a} points."),
            "lose": ("{name} loses {a} points.", "A mistake costs {a} points."),
            "gain_groups": ("{name} wins {a} rounds of {b} points each.",),
            "lose_groups": ("{name} loses {a} rounds of {b} points each.",),
            "times": ("A bonus multiplies the points by {a}.",),
            "share": ("The points are split equally among {a} players of the team.",),
        },
    ),
}
ASKS = {
    "steps": "Show each step and end with the answer.",
    "plain": "Work it out, then say the answer.",
    "told": "Explain how you get there.",
}


class Math(Family):
    """Problems about a number and what happens to it."""

    about = About("math", "arithmetic word problems with worked steps", "-")
    asks = "knowledge"

    def draw(self, rng, level) -> Content:
        cap, (low, high) = CAPS[level], EVENTS[level]
        start = value = rng.integers(4, cap - 4)
        count, events = rng.integers(low, high + 1), []
        while len(events) < count:
            kind = KINDS[rng.integers(2) if rng.chance(0.5) else rng.integers(2, 6)]
            event = (kind, rng.integers(2, 10 if kind not in ("gain", "lose") else 20), rng.integers(2, 10))
            event = event if kind.endswith("groups") else (kind, event[1], 0)
            after = steps_of(value, (event,))
            if after is None or not 1 <= after[-1][3] <= cap or max(step[3] for step in after) > cap:
                continue
            if kind in ("times", "share") and any(done[0] == kind for done in events):
                continue
            value = after[-1][3]
            events.append(event)
        return start, tuple(events)

    def key(self, content):
        return " ; ".join(map(written, steps_of(*content) or ()))

    def write(self, rng, level, content):
        theme, asked = rng.choice(tuple(THEMES)), rng.choice(tuple(ASKS))
        story, question, filled = told(rng, theme, content)
        steps = steps_of(*content) or ()
        lead = {
            "counter": "The counter starts at",
            "game": f"{filled['name']} starts with",
            "owner": f"{filled['name']} starts with",
        }.get(theme, "We start with")
        lines = [f"{written(step)}." for step in steps]
        if asked == "steps":
            lines = [f"Step {i}: {line}" for i, line in enumerate(lines, 1)]
        elif asked == "plain":
            lines = [f"{'First' if i == 0 else 'Then'} {line}" for i, line in enumerate(lines)]
        else:
            lines = [f"{lead} {content[0]}.", *(f"So {line}" for line in lines)]
        answer = " ".join([*lines, f"The answer is {steps[-1][3]}."])
        prompt = f"{story} {question} {ASKS[asked]}" if rng.chance(0.7) else f"{ASKS[asked]} {story} {question}"
        return Question(self.name, level, prompt, (answer,), self.key(content), f"{theme}-{asked}", given=steps)

    def check(self, question, text):
        text = " ".join(text.split())
        head, found, result = text.rpartition("answer is ")
        if not found or not re.fullmatch(r"[0-9]{1,4} ?\.?", result):
            return False
        steps = tuple((int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(head))
        rest = re.sub(r"Step [0-9]+:|start(s)? (with|at) [0-9]+", "", EQUATION.sub("", head))
        same = len(steps) == len(question.given) and all(map(_same, steps, question.given))
        return same and int(result.rstrip(" .")) == question.given[-1][3] and not re.search(r"[0-9=]", rest)


EQUATION = re.compile(r"(?<![0-9])([0-9]{1,4}) ([-+*/]) ([0-9]{1,4}) = ([0-9]{1,4})(?![0-9])")


def _same(a: Equation, b: Equation) -> bool:
    turned = (a[2], a[1], a[0], a[3]) if a[1] in "+*" else a
    return b in (a, turned)


def written(step: Equation) -> str:
    """A step as it is written.

    >>> written((3, "+", 4, 7))
    '3 + 4 = 7'
    """
    return f"{step[0]} {step[1]} {step[2]} = {step[3]}"


def steps_of(start: int, events: tuple[tuple[str, int, int], ...]) -> tuple[Equation, ...] | None:
    """The steps for a list of events; None if a number would be negative or not whole.

    >>> steps_of(5, (("gain_groups", 2, 3), ("lose", 1, 0)))
    ((2, '*', 3, 6), (5, '+', 6, 11), (11, '-', 1, 10))
    """
    value, steps = start, []
    for kind, a, b in events:
        amount = a
        if kind.endswith("_groups"):
            amount = a * b
            steps.append((a, "*", b, amount))
        sign = {"gain": "+", "lose": "-", "times": "*", "share": "/"}[kind.removesuffix("_groups")]
        after = applied(value, sign, amount)
        if after is None:
            return None
        steps.append((value, sign, amount, after))
        value = after
    return tuple(steps)


def applied(value: int, sign: str, amount: int) -> int | None:
    """A step's result; None if it is negative or not a whole number."""
    if sign == "/":
        return value // amount if amount and value % amount == 0 else None
    after = {"+": value + amount, "-": value - amount, "*": value * amount}[sign]
    return after if after >= 0 else None


def told(rng, theme: str, content: Content) -> tuple[str, str, dict[str, str]]:
    """A problem worded by a theme, its question, and the names in both."""
    opening, question, phrases = THEMES[theme]
    filled = {
        "name": rng.choice(NAMES),
        "items": rng.choice([f"{word}s" for word in (*THINGS, *FRUITS) if word[-1] not in "shxy" and word != "knife"]),
        "animals": rng.choice(
            [f"{word}s" for word in ANIMALS if word not in ("fox", "wolf", "mouse", "sheep", "deer")]
        ),
    }
    events = [rng.choice(phrases[kind]).format(a=a, b=b, **filled) for kind, a, b in content[1]]
    return " ".join([opening.format(start=content[0], **filled), *events]), question.format(**filled), filled
