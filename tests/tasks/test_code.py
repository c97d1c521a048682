"""The checker of code: what means the same passes, what means something else fails, and hostile text is refused at once."""

import itertools
import time

import pytest

from specjax.tasks import FAMILIES, LEVELS, Question, Rng, check, generate
from specjax.tasks.expression import Function, Refused

QUESTION = Question("code", 1, "", ("def f(xs): return sum(x * x for x in xs if x > 3)",), "", given="numbers")
LISTED = Question("code", 1, "", ("def f(xs): return [x + 1 for x in xs]",), "", given="numbers")


@pytest.mark.parametrize("level", LEVELS)
def test_references_run_as_python_does(level):
    """Python itself is the oracle, on functions that the generator wrote."""
    for question in generate("code", level, 3, 40):
        source = question.answers[0]
        names: dict = {}
        exec(source, names)
        mine = Function(source)
        values = [[7, -3, 0, 12, 49, 7], list(range(-20, 50))]
        for given in values if question.given == "numbers" else [["a", "stone", "lantern", "se"], []]:
            assert mine(given) == names[source[4 : source.index("(")]](given)


@pytest.mark.parametrize(
    "same",
    (
        "def f(ys): return sum([y * y for y in ys if y > 3])",
        "def f(xs): return sum(x * x for x in xs if not x <= 3)",
        "def f(xs):\n    return sum(x * x if x > 3 else 0 for x in xs)",
        "def f(xs): return sum(x * x for x in xs if x >= 4)",
    ),
)
def test_other_code_of_the_same_meaning_passes(same):
    assert check(QUESTION, same)


@pytest.mark.parametrize(
    "other",
    (
        "def f(xs): return sum(x * x for x in xs if x > 4)",
        "def f(xs): return sum(x * x for x in xs)",
        "def f(xs): return sum(x for x in xs if x > 3)",
        "def f(xs): return [x * x for x in xs if x > 3]",
        "def g(xs): return sum(x * x for x in xs if x > 3)",
        "def f(xs, k): return sum(x * x for x in xs if x > 3)",
        "f = sum(x * x for x in xs if x > 3)",
        "sum(x * x for x in xs if x > 3)",
        "def f(xs): return sum(x * x for x in xs if x > 3",
    ),
)
def test_code_of_another_meaning_fails(other):
    assert not check(QUESTION, other)


def test_types_count():
    assert check(LISTED, "def f(xs): return [1 + x for x in xs]")
    assert not check(LISTED, "def f(xs): return [x + 1 == x + 1 for x in xs]")
    one = Question("code", 1, "", ("def f(xs): return 1",), "", given="numbers")
    assert check(one, "def f(xs): return 3 - 2") and not check(one, "def f(xs): return 1 == 1")


HOSTILE = {
    "attribute": "def f(xs): return xs.sort()",
    "dunder": "def f(xs): return xs.__class__.__base__.__subclasses__()",
    "dunder name": "def f(xs): return __import__('os')",
    "dunder variable": "def f(xs): return [__x__ for __x__ in xs]",
    "default": "def f(xs=print('x')): return 1",
    "keyword default": "def f(xs, *, k=[1]): return 1",
    "star": "def f(*xs): return 1",
    "annotation": "def f(xs: print('x')): return 1",
    "returns": "def f(xs) -> print('x'): return 1",
    "decorator": "@print\ndef f(xs): return 1",
    "two statements": "def f(xs): print(1); return 1",
    "after it": "def f(xs): return 1\nimport os",
    "lambda": "def f(xs): return (lambda: 1)()",
    "walrus": "def f(xs): return (y := 1)",
    "walrus in a loop": "def f(xs): return [y := x for x in xs]",
    "f-string": "def f(xs): return f'{xs}'",
    "format": "def f(xs): return '%999999999d' % 1",
    "power": "def f(xs): return 9 ** 9 ** 9",
    "power call": "def f(xs): return pow(9, 9999999)",
    "shift": "def f(xs): return 1 << 9999999999",
    "division": "def f(xs): return 1 / 3",
    "range": "def f(xs): return [i for i in range(10 ** 9)]",
    "loops in loops": "def f(xs): return [0 for a in xs for b in xs for c in xs for d in xs]",
    "loops of loops": "def f(xs): return [[[[0 for a in xs] for b in xs] for c in xs] for d in xs]",
    "loop over a loop": "def f(xs): return [0 for a in [0 for b in xs]]",
    "shadowing": "def f(xs): return [sum for sum in xs]",
    "shadowing argument": "def f(sum): return sum(1)",
    "list product": "def f(xs): return [0] * 999999999",
    "string product": "def f(xs): return 'a' * 999999999",
    "growing numbers": "def f(xs): return " + " * ".join(["9999"] * 60),
    "growing lists": "def f(xs): return " + " + ".join(["xs"] * 90),
    "deep": "def f(xs): return " + "(" * 150 + "1" + ")" * 150 + " + " + "-" * 60 + "1",
    "deep minus": "def f(xs): return " + "- " * 150 + "1",
    "deep lists": "def f(xs): return " + "[" * 80 + "]" * 80,
    "too many brackets": "def f(xs): return " + "(" * 300,
    "long": "def f(xs): return 1" + " " * 500 + "+ 1",
    "big constant": "def f(xs): return 1" + "0" * 300,
    "float": "def f(xs): return 1e308",
    "complex": "def f(xs): return 1j",
    "bytes": "def f(xs): return b'a'",
    "none": "def f(xs): return None",
    "dots": "def f(xs): return ...",
    "star call": "def f(xs): return max(*xs)",
    "key": "def f(xs): return sorted(xs, key=len)",
    "eval": "def f(xs): return eval('1')",
    "open": "def f(xs): return open('x')",
    "set": "def f(xs): return {x for x in xs}",
    "dict": "def f(xs): return {x: x for x in xs}",
    "generator": "def f(xs): return (x for x in xs)",
    "generator in len": "def f(xs): return len(x for x in xs)",
    "starred": "def f(xs): return [*xs, *xs]",
    "yield": "def f(xs): return (yield xs)",
    "await": "async def f(xs): return 1",
    "nothing returned": "def f(xs): return",
    "class": "class f: pass",
    "null": "def f(xs): return 1\0",
    "no ascii": "def f(xs): return 𝟙",
    "bad escape": "def f(xs): return '\\d'",
    "warning": "def f(xs): return 1if xs else 0",
    "type parameters": "def f[T: print('x')](xs): return 1",
    "empty": "",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_code_is_refused_quickly(source, capsys):
    began = time.process_time()
    with pytest.raises(Refused):
        Function(source)([3] * 70)
    assert not check(QUESTION, source) and not check(LISTED, source)
    assert time.process_time() - began < 0.5 and capsys.readouterr().out == ""


def test_what_python_would_raise_is_no_answer():
    for source in ("xs[99]", "1 // 0", "max([])", "sum(xs) + 'a'", "-xs", "xs < 1"):
        with pytest.raises(Refused):
            Function(f"def f(xs): return {source}")([1, 2])
    with pytest.raises(Refused, match="takes 1 arguments"):
        Function("def f(xs): return 1")()


def test_a_key_knows_neither_names_nor_the_order_of_conditions():
    family, rng = FAMILIES["code"], Rng("keys")
    content = family.draw(rng, 3)
    kind, tests, *rest = content
    bodies = set()
    for order in itertools.permutations(tests):
        turned = (kind, order, *rest)
        assert family.key(turned) == family.key(content)
        bodies |= {family.write(rng, 3, turned).answers[0].partition(": ")[2] for _ in range(20)}
    assert len(bodies) > 6 and family.key(family.draw(rng, 3)) != family.key(content)
