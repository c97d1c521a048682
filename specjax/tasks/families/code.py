"""A one-line Python function from a description, checked on inputs by walking its syntax tree."""

import functools
import re
from typing import Any

from specjax.about import About
from specjax.tasks.base import Family, Question, Rng
from specjax.tasks.expression import Function, Refused

# a condition or change on `{x}`: the code, then wordings
Piece = tuple[str, tuple[str, ...]]
CONDITIONS: tuple[Piece, ...] = (
    ("{x} > {k}", ("above {k}", "greater than {k}", "larger than {k}")),
    ("{x} < {k}", ("below {k}", "less than {k}", "smaller than {k}")),
    ("{x} >= {k}", ("at least {k}", "not below {k}")),
    ("{x} <= {k}", ("at most {k}", "not above {k}")),
    ("{x} != {k}", ("other than {k}", "not equal to {k}")),
    ("{x} % {m} == 0", ("divisible by {m}", "that {m} divides")),
    ("{x} % {m} != 0", ("not divisible by {m}", "that {m} does not divide")),
    ("{x} % {m} == 1", ("with remainder 1 by {m}", "that leave 1 when divided by {m}")),
)
CHANGES: tuple[Piece, ...] = (
    ("{x}", ("them as they are",)),
    ("{x} + {k}", ("each plus {k}", "each raised by {k}")),
    ("{x} - {k}", ("each minus {k}", "each lowered by {k}")),
    ("{x} * {m}", ("each times {m}", "each multiplied by {m}")),
    ("{x} // {m}", ("each divided by {m} without rest",)),
    ("{x} % {m}", ("the remainder of each by {m}",)),
    ("{x} * {x}", ("the square of each", "each times itself")),
    ("{x} * {m} + {k}", ("each times {m} plus {k}",)),
    ("{x} * {m} - {k}", ("each times {m} minus {k}",)),
    ("{x} * {x} + {k}", ("the square of each plus {k}",)),
    ("abs({x})", ("the absolute value of each",)),
    ("abs({x} - {k})", ("the distance of each from {k}",)),
    ("-{x}", ("the negative of each",)),
)
WORD_CONDITIONS: tuple[Piece, ...] = (
    ("len({x}) > {k}", ("longer than {k} letters",)),
    ("len({x}) < {k}", ("shorter than {k} letters",)),
    ("len({x}) == {k}", ("of exactly {k} letters",)),
    ("'{c}' in {x}", ('with a letter " {c}" in them', 'that have the letter " {c}"')),
    ("'{c}' not in {x}", ('without the letter " {c}"',)),
)
WORD_CHANGES: tuple[Piece, ...] = (
    ("{x}", ("them as they are",)),
    ("len({x})", ("the length of each",)),
    ("len({x}) + {k}", ("the length of each plus {k}",)),
    ("len({x}) * {m}", ("the length of each times {m}",)),
    ("{x}[::-1]", ("each turned around", "each from back to front")),
    ("{x}[:{m}]", ("the first {m} letters of each",)),
    ("{x}[{m}:]", ("each without its first {m} letters",)),
    ("{x} + '{c}'", ('each with a letter " {c}" added',)),
    ("'{c}' + {x}", ('each with a letter " {c}" in front',)),
)
ENDS: tuple[Piece, ...] = (
    ("[{loop}]", ("as a list", "in a list")),
    ("sorted({loop})", ("sorted", "in ascending order")),
    ("sorted([{loop}], reverse=True)", ("sorted downwards", "in descending order")),
    ("[{loop}][::-1]", ("as a list from back to front",)),
    ("[{loop}][:{m}]", ("as a list, only the first {m}",)),
    ("sum({loop})", ("summed up", "as a sum")),
    ("max([{loop}] + [{k}])", ("and of these and {k} the largest",)),
    ("min([{loop}] + [{k}])", ("and of these and {k} the smallest",)),
)
ASKS = (
    "Write a one-line function {name} of a list {xs}: of its {kind} {which}, take {what}, {end}.",
    "Python, one line: {name}({xs}) takes the {kind} in {xs} {which} and returns {what}, {end}.",
    "Define {name}. Its argument {xs} is a list of {kind}. It returns {what}, {end}, for those {which}.",
    "For the {kind} of a list {xs} {which}, return {what}, {end}. Call the function {name}.",
    "I need {name}({xs}) in one line. It looks at the {kind} {which} and gives back {what}, {end}.",
    "Given a list {xs} of {kind}, a function {name} shall keep those {which}, and return {what}, {end}.",
    "One line of Python, please: from {xs}, a list of {kind}, {name} uses only those {which} and returns {what}, {end}.",
)
FUNCTIONS = ("pick", "work", "get", "solve", "make", "find", "run", "calc")
LISTS = {"numbers": (("xs", "x"), ("ns", "n"), ("values", "v")), "words": (("ws", "w"), ("words", "w"), ("names", "s"))}


class Code(Family):
    """A comprehension: which items it takes, what it makes of each, and what of all."""

    about = About("code", "a one-line Python function from a description", "-")
    asks = "knowledge"

    def draw(self, rng, level):
        kind = "words" if rng.chance(0.35) else "numbers"
        words = kind == "words"
        any_of = level > 1 and rng.chance(0.5)
        tests = [_drawn(rng, WORD_CONDITIONS if words else CONDITIONS) for _ in range(level)]
        while not _apart(tests, any_of):
            tests = [_drawn(rng, WORD_CONDITIONS if words else CONDITIONS) for _ in range(level)]
        change = _drawn(rng, WORD_CHANGES if words else CHANGES)
        strings = words and not change[0].startswith("len")
        end = _drawn(rng, ENDS[:5] if strings else ENDS)
        return kind, tuple(tests), change, end, any_of

    def key(self, content):
        kind, tests, *rest = content  # the order of conditions and the names of variables mean nothing
        return _written((kind, tuple(sorted(tests)), *rest), "f", "xs", "x")

    def write(self, rng, level, content):
        kind, tests, change, end, any_of = content
        xs, x = rng.choice(LISTS[kind])
        name, form = rng.choice(FUNCTIONS), rng.integers(len(ASKS))
        said = [_said(rng, *test) for test in tests]
        which = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} {'or' if any_of else 'and'} {said[-1]}"
        words = {
            "name": name,
            "xs": xs,
            "kind": kind,
            "which": which,
            "what": _said(rng, *change),
            "end": _said(rng, *end),
        }
        answer = _written(content, name, xs, x)
        return Question(
            self.name, level, ASKS[form].format(**words), (answer,), self.key(content), f"ask {form}", given=kind
        )

    def check(self, question, text):
        try:
            made = Function(text)
        except Refused:
            return False
        wanted = Function(question.answers[0])
        named = re.match(r"\s*def\s+(\w+)", text)
        if named is None or f"def {named[1]}(" not in question.answers[0] or len(made.arguments) != 1:
            return False
        return all(_same(_outcome(made, values), _outcome(wanted, values)) for values in inputs(question.given))


def _drawn(rng, pieces: tuple[Piece, ...]):
    """A piece with its drawn numbers: code, wordings, and the values to fill in."""
    code, wordings = rng.choice(pieces)
    return (
        code,
        wordings,
        (
            ("k", rng.integers(1, 30 if "len" not in code else 8)),
            ("m", rng.integers(2, 8)),
            ("c", rng.choice("aeiorstln")),
        ),
    )


def _apart(tests, any_of: bool) -> bool:
    """Whether conditions differ, and their bounds let neither all items nor none pass."""
    kinds = [next(sign for sign in ("not in", "in", "len", "%", "!=", ">", "<") if sign in test[0]) for test in tests]
    letters = [dict(test[2])["c"] for test in tests if "{c}" in test[0]]
    if len({*kinds}) < len(kinds) or len({*letters}) < len(letters):
        return False
    bounds = {kind: dict(test[2])["k"] for kind, test in zip(kinds, tests, strict=True)}
    return not {">", "<"} <= {*kinds} or (not any_of and bounds[">"] + 3 < bounds["<"])


def _said(rng, code: str, wordings, filled) -> str:
    return rng.choice(wordings).format(**dict(filled))


def _written(content, name: str, xs: str, x: str) -> str:
    _, tests, change, end, any_of = content
    filled = [test[0].format(x=x, **dict(test[2])) for test in tests]
    loop = (
        f"{change[0].format(x=x, **dict(change[2]))} for {x} in {xs} if {(' or ' if any_of else ' and ').join(filled)}"
    )
    return f"def {name}({xs}): return {end[0].format(loop=loop, **dict(end[2]))}"


@functools.cache
def inputs(kind: str) -> tuple[list[Any], ...]:
    """Lists on which to compare two functions: an empty one, each item by itself, and many items in several orders."""
    rng = Rng("code", kind)
    if kind == "numbers":
        pool: list[Any] = list(range(-25, 50))
    else:
        pool = ["".join(rng.choice("aeiorstlnbdm") for _ in range(n)) for n in range(1, 10) for _ in range(9)]
    mixed = [rng.sample(pool, 14) for _ in range(6)]
    return ([], *([item] for item in pool), *mixed, rng.shuffled(pool), mixed[0] + mixed[0][::-1])


def _outcome(function: Function, values: list[Any]):
    try:
        return "value", function(list(values))
    except Refused:
        return "error", None


def _same(a: Any, b: Any) -> bool:
    """Whether values and types are equal, also inside lists: 1 and True differ."""
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b
