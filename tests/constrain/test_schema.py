"""JSON Schemas as expressions: every text is valid as `jsonschema` reads it, and what is said to be written can be written."""

import itertools
import json
import re

import numpy as np
import pytest
from support.constraints import accepts, random_text, vocabulary

from specjax.constrain import compiled
from specjax.constrain.numbers import integers, numbers
from specjax.constrain.pattern import in_string
from specjax.constrain.regular import automaton
from specjax.constrain.schema import expression

pytest.importorskip("outlines_core")
jsonschema = pytest.importorskip("jsonschema")
PERSON = {
    "type": "object",
    "properties": {
        "nick": {"type": "string", "maxLength": 5},
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 131},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"', 3, None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "more"],
    "additionalProperties": {"type": "boolean"},
}
TREE = {
    "$defs": {"node": {"properties": {"value": {"type": "number"}, "next": {"$ref": "#/$defs/node"}}, "required": ["value"]}},
    "$ref": "#/$defs/node",
}  # fmt: skip
SHAPE = {
    "oneOf": [
        {"properties": {"kind": {"const": "disc"}, "r": {"type": "number", "minimum": 0}}, "required": ["kind", "r"]},
        {"properties": {"kind": {"const": "box"}, "w": {"type": "integer"}}, "required": ["kind", "w"]},
    ]
}
SCHEMAS = {
    "person": (
        PERSON,
        [
            {"name": "a", "age": 130, "more": True},
            {"nick": "", "name": 'é', "age": 0, "tags": [3], "more": False},
        ],
    ),
    "tree": (TREE, [{"value": 1.5}, {"value": -2, "next": {"value": 1e-9, "next": {"value": 0}}}]),
    "shape": (SHAPE, [{"kind": "disc", "r": 0.25}, {"kind": "box", "w": -7}]),
    "any": (True, [None, True, "x", -1.5e9, [], ["a", 1], {}, {"a": None}]),
    "types": ({"type": ["null", "integer", "boolean"]}, [None, True, 12]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": -2}]),
    "tuple": ({"prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False}, [[], [1], [1, "x"]]),
    "tail": (
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        [[None, True], [None, True, False, True]],
    ),
    "all": (
        {"allOf": [{"type": ["integer", "string"]}, {"type": "number", "minimum": 3}, {"maximum": 9}], "minimum": 5},
        [5, 9],
    ),
    "any of": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": None}, {"a": 1, "b": None}],
    ),
    "values": ({"enum": [1, "1", {"a": [1, {}]}, [], 2.5, True]}, [1, "1", {"a": [1, {}]}, [], 2.5, True]),
    "constant": ({"const": {"x": "a|b"}, "type": "object"}, [{"x": "a|b"}]),
    "bounded": ({"type": "number", "exclusiveMinimum": -1, "maximum": 12}, [-0.5, 0, 0.25, 11.999, 12]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$|x"}, ["AB-12", "axb"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-28", "1999-12-31"]),
    "moment": ({"type": "string", "format": "date-time"}, ["2024-02-28T23:59:59Z", "1999-12-31T00:00:00.5+01:00"]),
    "address": ({"type": "string", "format": "ipv4"}, ["255.0.10.1"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["00000000-1111-2222-3333-abcdefabcdef"]),
    "mail": ({"type": "string", "format": "email"}, ["a.b-c@d.org"]),
    "pointer": ({"$defs": {"a/b%": {"type": "null"}}, "items": {"$ref": "#/$defs/a~1b%25"}, "type": "array"}, [[None, None]]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_valid(name):
    """With room, and with the least room in which a text ends."""
    schema, examples = SCHEMAS[name]
    check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate
    table, rng = compiled(f"json:{json.dumps(schema)}", vocabulary()), np.random.default_rng(0)
    texts = [random_text(table, rng, max(1, int(table.distance[0])) + more) for more in (0, 1, 2, 5, 20, 50) * 6]
    for text in texts:
        check(json.loads(text))
    for example, spaces in itertools.product(examples, ((", ", ": "), (",", ":"))):
        check(example)
        text = json.dumps(example, ensure_ascii=False, separators=spaces)
        assert accepts(automaton(expression(schema), ""), text), text
    assert name in ("constant", "pointer") or len(set(texts)) > 2


NEVER = {
    "date": ("0000-01-01", "2023-02-29", "2024-04-31", "2024-13-01", "2024-1-01"), "address": ("256.0.0.1", "01.1.1.1"),
    "moment": ("2024-02-28 23:59:59Z", "2024-02-28T24:00:00Z", "2024-02-28T23:59:59"), "mail": ("a@b", "a@b..c", "@b.c"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER)
def test_formats_hold_nothing_else(name):
    own = automaton(expression(SCHEMAS[name][0]), "")
    assert not [text for text in NEVER[name] if accepts(own, f'"{text}"')]


REFUSED = {
    '{"type": "array", "uniqueItems": true}': "unsupported keyword: uniqueItems",
    '{"patternProperties": {}}': "unsupported keyword: patternProperties",
    '{"type": "object", "properties": {"a": {"not": {}}}}': "unsupported keyword: not",
    '{"type": "string", "format": "hostname"}': "unsupported keyword: format 'hostname'; date, ",
    '{"type": "string", "pattern": "(?=a)b"}': "pattern '(?=a)b' has assert, which is not supported",
    '{"type": "string", "pattern": "a", "minLength": 2}': "unsupported keyword: pattern beside minLength or maxLength",
    '{"oneOf": [{"type": "integer"}, {"type": "number"}]}': "unsupported keyword: oneOf of branches that may both hold",
    '{"type": "array", "items": [{}]}': "unsupported keyword: items as a list; prefixItems",
    '{"allOf": [{"pattern": "a"}, {"pattern": "b"}]}': "unsupported keyword: two of pattern that hold at once",
    '{"allOf": [{"additionalProperties": false}, {"properties": {"a": {}}}]}': "additionalProperties beside properties of",
    '{"enum": [1], "minimum": 0}': "unsupported keyword: minimum beside enum or const",
    '{"$ref": "other.json"}': "$ref to 'other.json'; only #/... within the schema", '{"$ref": "#/a"}': "no part '#/a'",
    '{"type": "number", "minimum": 0.5}': "a bound of 0.5 of numbers; whole ones are supported",
    "false": "the schema allows no value", '{"type": "integer", "minimum": 2, "maximum": 1}': "the schema allows no value",
    '{"$ref": "#"}': "the schema allows no value", '{"required": ["a"], "properties": {"a": false}}': "allows no value",
    '{"minItems": 3, "items": false}': "allows no value", '{"enum": ["a"], "type": "integer"}': "allows no value",
    '{"type": "text"}': "the type 'text', which JSON does not have", '{"properties": 3}': "properties is 3, which it cannot",
    '{"required": [{}]}': "the schema's required holds {}, which is no name",
    '{"anyOf": []}': "anyOf is [], and should be a list", '{"items": 3}': "a part of the schema is 3",
}  # fmt: skip


@pytest.mark.parametrize("schema", REFUSED)
def test_what_cannot_be_followed_is_named(schema):
    with pytest.raises(ValueError, match=re.escape(REFUSED[schema])) as error:
        compiled(f"json:{schema}", vocabulary())
    assert str(error.value).startswith("constraint json:") and "\n" not in str(error.value)


def test_branching_references_end():
    tree = {
        "$defs": {"t": {"properties": {name: {"$ref": "#/$defs/t"} for name in "abcdefghijklmnopq"}}},
        "$ref": "#/$defs/t",
    }
    with pytest.raises(ValueError, match="more than 20000 parts"):
        expression(tree)


EDGES = (None, -1000, -105, -100, -12, -10, -9, -1, 0, 1, 7, 10, 19, 20, 99, 100, 101, 250, 999, 1000)


def test_ranges_of_integers_hold_what_they_say():
    said = [str(n) for n in range(-1300, 1301)]
    for low, high in itertools.product(EDGES, EDGES):
        found = integers(low, high)
        want = [text for text in said if (low is None or low <= int(text)) and (high is None or int(text) <= high)]
        assert (found is None) == (low is not None and high is not None and low > high)
        matches = re.compile(found or "(?!)").fullmatch
        assert [text for text in said if matches(text)] == want, (low, high)
        assert not matches("007") and not matches("1.0")


def test_ranges_of_numbers_hold_what_they_say():
    said = [f"{sign}{whole}{rest}" for sign in ("", "-") for whole in (0, 1, 2, 9, 10, 11, 12, 99, 100)
            for rest in ("", ".0", ".5", ".05", ".000", ".999")]  # fmt: skip
    for low, high, above, below in itertools.product(
        (None, -10, -1, 0, 2, 10), (None, -2, 0, 1, 10, 100), (0, 1), (0, 1)
    ):
        if low is None and high is None:
            continue
        found = numbers(low, high, bool(above and low is not None), bool(below and high is not None))
        left, right = -np.inf if low is None else low, np.inf if high is None else high
        want = {text for text in said if left <= float(text) <= right}
        want -= {text for text in want if above and float(text) == left or below and float(text) == right}
        got = {text for text in said if re.fullmatch(found or "(?!)", text)}
        assert {text for text in got ^ want if float(text)} == set(), (low, high, above, below)
        assert got <= want and ("0" in got) == ("0" in want)


PATTERNS = (
    "a", "^a", "b$", "^a*$", "^[^a]$", '"', "^\\\\+$", "^.b?$", "^\\s?a$", "^(a|\\n)+$", "^\\D$", "^[^\\d\\n]{2}$", "a|^b$",
    "^(?:ab)?\\w$", '^[a"]{1,2}$', "^[^\\W]$", "^$", "",
)  # fmt: skip
SIGNS = ("a", "b", '"', "\\", "\n", " ", "7", "é")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_hold_what_python_finds(pattern):
    """Of ASCII all that Python finds, but nothing before a last line break; of other signs nothing else."""
    own = automaton(f'"(?:{in_string(pattern)})"', "")
    for text in map("".join, (row for n in range(4) for row in itertools.product(SIGNS, repeat=n))):
        found = re.search(pattern, text) is not None
        got = accepts(own, json.dumps(text, ensure_ascii=False))
        assert got == found or found and ("é" in text or text.endswith("\n")), text
