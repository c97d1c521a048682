"""Grammars as tables: what llguidance accepts, up to a depth, and no other text."""

import dataclasses
import functools
import random

import numpy as np
import pytest
from support.constraints import random_text, vocabulary

import specjax
from specjax import Sampling
from specjax.constrain import Table, compiled
from specjax.constrain.context_free import bounded
from specjax.constrain.grammar import _tokenizer
from specjax.constrain.table import distances

pytestmark = pytest.mark.covers("constrain", "constraint")
guidance, lark = pytest.importorskip("llguidance"), pytest.importorskip("lark")
DYCK = 'start: ("(" start ")")*\n'
LISTS = 'start: "[" item ("," item)* "]"\nitem: start | /[0-9]{1,2}/\n'
SUMS = """
start: e
?e: e "+" t -> add | e "-" t | t
?t: t "*" f | f
f: /[0-9]+/ | "-" f | "(" e ")"
%ignore / +/
"""
NAMES = 'start: NAME | NAME "and" start\nNAME: /[adn]+/\n%ignore / +/\n'
SELECT = """
start: "select"i cols "from"i NAME where?
cols: "*" | NAME ("," NAME)*
where: "where"i cond
cond: NAME "=" val | cond "and"i cond | "not"i cond | "(" cond ")"
val: NAME | INT | STRING
NAME: /[a-z]+/
INT: /[0-9]+/
STRING: "'" /[^']*/ "'"
WS: /[ \\n]+/
%ignore WS
"""
JSON = """
start: value
value: object | array | ESCAPED_STRING | NUMBER | "true" | "false" | "null"
object: "{" [pair ("," pair)*] "}"
pair: ESCAPED_STRING ":" value
array: "[" [value ("," value)*] "]"
%import common (ESCAPED_STRING, NUMBER, WS)
%ignore WS
"""
PROGRAM = """
start: stmt+
stmt: "if" ID "then" stmt ("else" stmt)? | ID "=" ID ";" | "{" stmt* "}"
ID: /[a-z_][a-z0-9_]*/
%ignore / +/
%ignore /#[^\\n]*\\n/
"""
COMMENTS = 'start: (CNAME ";")+\n%import common (CNAME, C_COMMENT)\n%ignore C_COMMENT\n'
ODD = 'start: "if" "x" | /[a-z]+/ "y" | "é" /ü+/ "\\n"~2..3 | "a b" C\nC: "+ " /[*]/ "\\n"\n'
SMALL = (
    (DYCK, "()", 10), (NAMES, "adn ", 4), ('start: A B | A start "b" | "x"\nA: /a+/\nB: /ab|b/\n', "abx", 5),
    ('start: A "c" | B "d"\nA: /[ab]+/\nB: /a+/\n', "abcd", 4), ('start: T+\nT: /a| b/\n%ignore / /\n', "ab ", 5),
)  # fmt: skip
LARGER = (
    (SUMS, "1+*( )", 5), (LISTS, "[],1", 6), (NAMES, "adn ", 6),
    ('start: start "+" start | "(" start ")" | "a"\n', "a+()", 7),
    ('start: x?\nx: "a" x "b" | x "a" | "a"\n%ignore "c"\n', "abc", 7),
    ('start: "a" start | start "b" | "c"\n%ignore /-+/\n', "abc-", 6),
)  # fmt: skip
"""Grammars, their signs, and the most of a text."""
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in LARGER]


@functools.cache
def guided(grammar):
    return guidance.LLMatcher(_tokenizer(vocabulary()), guidance.LLMatcher.grammar_from_lark(grammar), log_level=0)


def accepted(grammar, text):
    """Whether llguidance accepts a text as a whole, given byte by byte."""
    by_byte = {own: token for token, own in enumerate(vocabulary().tokens) if own and len(own) == 1}
    tokens, matcher = [by_byte[bytes([byte])] for byte in text], guided(grammar).deep_copy()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("grammar, signs, most", [*SMALL, *SLOW])
def test_the_table_has_llguidances_texts_up_to_the_depth(grammar, signs, most):
    own, new, counts = bounded(grammar, "grammar:x"), [b""], [0, 0]
    while new:
        text = new.pop()
        is_in, wanted = own.holds(text), accepted(grammar, text)
        assert not is_in or wanted, text
        deep = max((text[:end].count(b"(") - text[:end].count(b")") for end in range(len(text) + 1)), default=0) > 4
        assert is_in or not wanted or deep, text
        counts[0] += is_in
        counts[1] += deep and wanted
        new += [text + sign.encode() for sign in signs if len(text) < most]
    assert counts[0] > 5 and (counts[1] == 1 if grammar == DYCK else counts[1] == 0)


def test_a_rule_leads_back_to_itself_three_times():
    nested = lambda n, sign="": ("[" * n + sign + "]" * n).encode()
    own = bounded(LISTS, "grammar:x")
    assert own.holds(nested(4, "1")) and not own.holds(nested(5, "1"))
    own = bounded(DYCK, "grammar:x")
    assert own.holds(b"(((())))" * 20) and not own.holds(b"((((()))))")
    own = bounded(SUMS, "grammar:x")
    assert own.holds(b"+".join([b"1*(2)"] * 50)) and own.holds(b"-" * 50 + b"(((1)))") and not own.holds(b"((((1))))")
    own = bounded('start: "a" rest\nrest: "," start | "!"\n', "grammar:x")  # a list through two rules
    assert own.holds(b"a,a,a,a,a,a,a,a!")


def walk(own, rng, length):
    """A text of an automaton, of at least so many bytes if there is one on the way."""
    far, state, text = distances(own.following, own.accepts), 0, b""
    readable = np.isin(np.arange(256), list(b"()[]{}+-*,:\"' abdnst012;=\n_"))
    while len(text) < length or not own.accepts[state]:
        may = own.following[state] >= 0
        if not may.any():
            break
        if len(text) >= length:
            may &= far[own.following[state]] < far[state]
        elif (may & readable).any() and rng.random() < 0.8:
            may &= readable
        byte = rng.choice(np.flatnonzero(may).tolist())
        state, text = own.following[state, byte], text + bytes([byte])
    return text


def check_walks(grammar, count):
    own, rng = bounded(grammar, "grammar:x"), random.Random(0)
    texts = {walk(own, rng, rng.randint(0, 40)) for _ in range(count)}
    assert [text for text in texts if not accepted(grammar, text)] == []
    return texts


def test_llguidance_accepts_random_texts_of_tables():
    for grammar in (SUMS, LISTS, COMMENTS, ODD):
        assert len(check_walks(grammar, 40)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("grammar", [DYCK, NAMES, SELECT, JSON, PROGRAM])
def test_llguidance_accepts_random_texts_of_larger_tables(grammar):
    assert len(check_walks(grammar, 400)) > 50


def test_a_canvas_has_the_table_of_the_nested_grammar():
    canvas = dataclasses.replace(vocabulary(), gaps=True)
    own, table = compiled({"grammar": SUMS}, canvas), compiled({"nested": SUMS}, vocabulary())
    assert isinstance(own, Table) and own.digest == table.digest
    rng = np.random.default_rng(0)
    for _ in range(30):
        assert accepted(SUMS, random_text(table, rng, 12).encode())
    with pytest.raises(ValueError, match="its shortest text has 3 tokens, and the limit is 2"):
        compiled({"grammar": 'start: "(" "0" ")"'}, canvas, 2)


@pytest.mark.parametrize(
    "grammar, said",
    [
        ('{"type": "integer"}', "it is a JSON Schema, which json:... follows by a table"),
        ("start: x\n", "the grammar cannot be read"),
        ('start: %json {"type": "integer"}\n', "not llguidance's own syntax"),
        ("start: A* \"x\"\nA: /a*/\n", "not llguidance's own syntax: .*zero-width"),
        ("start: /a b #c/x\n", "not llguidance's own syntax: missing"),
        ("start: /a(?=b)/\n", "the grammar cannot be read: .*look-around"),
        ('start: "a" start\n', "the grammar allows no text, with each terminal as long as can be and rules"),
        pytest.param(
            'start: a a\na: "x" start "y" start "z" | "(" a ")" b | "q"\nb: "[" b a "]" start b "c" | /\\w{2}/ a\n',
            "nest less", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_what_has_no_table_is_one_line(grammar, said):
    with pytest.raises(ValueError, match=said) as error:
        compiled(f"nested:{grammar}", vocabulary())
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_models_write_texts_of_grammars():
    """A canvas before a suffix, all of it at once, and an autoregressive model."""
    gap = {"prompt": "Steps that repeat: 3, 4, 5,", "suffix": " 9, 10."}
    for name, prompts, kind in (
        ("tiny-diffusion", [gap, "Sort the numbers."], "grammar"),
        ("tiny", ["a", "b"], "nested"),
    ):
        asked = [Sampling(constraint={kind: own}, max_new_tokens=12, temperature=1.0) for own in (SUMS, LISTS)]
        records = specjax.generate(name, prompts, sampling=asked)
        for grammar, record in zip((SUMS, LISTS), records, strict=True):
            assert record.error is None and accepted(grammar, record.text.encode())
            lark.Lark(grammar).parse(record.text)
