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

MORE = {
    "patterns": (
        {
            "type": "object",
            "properties": {"id": {"type": "integer"}},
            "patternProperties": {"^x_": {"type": "boolean"}, "^n[a-c]$": {"type": "null"}},
            "additionalProperties": False,
        },
        [{}, {"id": 3}, {"id": 3, "x_": True, "na": None}, {"nb": None, "x_y": False}],
    ),
    "overlapping patterns": (
        {"patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 2}}},
        [{"a": 3, "ab": 4, "b": 2}],
    ),
    "names": (
        {"propertyNames": {"pattern": "^[ab]{1,2}$"}, "additionalProperties": {"type": "null"}},
        [{}, {"ab": None, "a": None}],
    ),
    "counted": (
        {
            "properties": {name: {"type": "null"} for name in "abcd"},
            "required": ["b"],
            "minProperties": 2,
            "maxProperties": 3,
        },
        [{"a": None, "b": None}, {"b": None, "c": None, "d": None}],
    ),
    "nonempty": (
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
        [{"x": None}],
    ),
    "dependent": (
        {
            "properties": {"card": {"type": "integer"}, "street": {"type": "null"}},
            "dependentRequired": {"card": ["street"]},
            "dependentSchemas": {"street": {"minProperties": 1}},
            "additionalProperties": False,
        },
        [{"card": 3, "street": None}, {"street": None}],
    ),
    "if": (
        {
            "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["kind", "n"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"properties": {"n": {"minimum": 5}}},
            "else": {"properties": {"n": {"maximum": 4}}},
        },
        [{"kind": "a", "n": 5}, {"kind": "b", "n": 4}],
    ),
    "not types": ({"not": {"type": ["string", "object", "array"]}}, [1, None, True, 0.5]),
    "not values": (
        {"not": {"enum": ["ab", "a", 3, None]}, "type": ["string", "integer", "null"]},
        ["", "b", "abc", 2, 4, -3],
    ),
    "not required": (
        {"type": "object", "not": {"required": ["a", "b"]}, "properties": {"a": {}, "b": {}}},
        [{"a": 1}, {"b": 1}, {}],
    ),
    "one of": (
        {
            "oneOf": [
                {"type": "string", "maxLength": 3},
                {"type": "string", "minLength": 2},
                {"type": "object", "required": ["a"]},
            ]
        },
        ["", "a", "abcd", {"a": 1}],
    ),
    "contains": (
        {"items": {"type": ["integer", "null"]}, "contains": {"minimum": 7, "type": "integer"}, "maxItems": 3},
        [[7], [None, 8, 1]],
    ),
    "contains some": (
        {"items": {"enum": [1, 2, 3]}, "contains": {"const": 1}, "minContains": 2, "maxContains": 3},
        [[1, 2, 1], [3, 1, 1, 1]],
    ),
    "different": (
        {"items": {"enum": ["x", "y", 3]}, "uniqueItems": True, "minItems": 1},
        [["x"], [3, "x"], ["y", 3, "x"]],
    ),
    "different in order": ({"items": {"enum": [*"abcdefg"]}, "uniqueItems": True}, [[], ["a", "c", "g"]]),
    "multiples": ({"type": "integer", "multipleOf": 25}, [0, -25, 100, 12375]),
    "few multiples": ({"multipleOf": 7, "minimum": 10, "exclusiveMaximum": 36}, [14, 35]),
    "several multiples": ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, [0, 12, -24]),
    "filtered values": ({"enum": [1, 12, "abc", "b", None], "minimum": 3, "pattern": "^a"}, [12, "abc", None]),
    "closed parts": (
        {
            "allOf": [
                {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
                {"properties": {"b": {}}},
            ]
        },
        [{"a": None, "b": 3}],
    ),
    "unevaluated": (
        {
            "allOf": [{"properties": {"a": {"type": "null"}}}],
            "properties": {"b": {"type": "null"}},
            "unevaluatedProperties": False,
        },
        [{"b": None, "a": None}, {"a": None}],
    ),
    "unevaluated items": (
        {"allOf": [{"prefixItems": [{"type": "null"}]}], "unevaluatedItems": {"type": "boolean"}},
        [[None, True], []],
    ),
    "pattern with a length": (
        {"type": "string", "pattern": "^[a-z][a-z0-9]*$", "minLength": 2, "maxLength": 4},
        ["ab", "a123"],
    ),
    "format with a length": (
        {"type": "string", "format": "uuid", "minLength": 1, "maxLength": 64},
        ["0" * 8 + "-0000" * 3 + "-" + "0" * 12],
    ),
    "remarks": (
        {
            "$schema": "x",
            "id": "y",
            "links": [],
            "x-own": 3,
            "note": "",
            "$comment": "",
            "examples": [3],
            "format": "int32",
            "type": "integer",
        },
        [5],
    ),
    "anchors": (
        {
            "$id": "http://a.org/b",
            "$defs": {"t": {"$anchor": "here", "type": "null"}, "u": {"$id": "c/", "$defs": {"v": {"const": 3}}}},
            "prefixItems": [{"$ref": "#here"}, {"$ref": "http://a.org/c/#/$defs/v"}, {"$dynamicRef": "#here"}],
            "items": False,
            "type": "array",
        },
        [[None, 3, None]],
    ),
}
"""Cases of keywords that become others."""


FAST = {*SCHEMAS, "patterns", "if", "different", "unevaluated", "anchors", "remarks"} - {"any", "values", "moment"}


@pytest.mark.parametrize(
    "name", [own if own in FAST else pytest.param(own, marks=pytest.mark.slow) for own in SCHEMAS | MORE]
)
def test_every_text_is_valid(name):
    """With room, and with the least room in which a text ends."""
    schema, examples = (SCHEMAS | MORE)[name]
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


ONE_OF = [{"properties": {"t": {"const": own}}, "required": ["t"]} for own in "xy"]
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
EXACTLY = {
    "one of objects": {"oneOf": ONE_OF},
    "one of objects or null": {"type": ["object", "null"], "oneOf": ONE_OF},
    "one of objects, null in one": {"oneOf": [ONE_OF[0] | {"type": ["object", "null"]}, ONE_OF[1] | {"type": "object"}]},
    "no integer": {"enum": [1, 2.5, "x"], "not": {"type": "integer"}},
    "if no integer": {"if": {"not": {"type": "integer"}}, "then": {"enum": [1, 2, 2.5]}, "else": False},
    "one integer": {"type": "array", "items": {"enum": [1, 2.5, 3]}, "contains": {"type": "integer"}, "maxContains": 1},
    "no integer of any kind": {"type": "number", "not": {"type": "integer"}},
    "below": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "above": {"type": "number", "exclusiveMinimum": -10, "exclusiveMaximum": 0},
    "int64": {"type": "integer", **INT64},
    "int64 numbers": {"type": "number", **INT64},
    "safe integers": {"type": "integer", "minimum": 2**53 - 1},
    "far numbers": {"type": "number", "minimum": 1e20},
    "below a far number": {"type": "number", "exclusiveMaximum": 1e20},
    "doubles": {"type": "integer", "minimum": 0, "maximum": 1.7976931348623157e308},
    "no null": {"type": "integer", "nullable": False},
}  # fmt: skip
TEXTS = (
    "null", "true", "1", "2", "2.5", "3", '"x"', '"abc"', "{}", '{"t": "x"}', '{"t": "y"}', "[]", "[1]", "[2.5]", "[1, 3]",
    "[3, 2.5, 2.5]", "[3, 3, 1]", "[3, 3,1]", "0", "0.25", "9.75", "10", "-0.5", "-10", "9007199254740990", "9007199254740991",
    str(2**63), str(2**63 - 1), str(-(2**63)), str(-(2**63) - 1), "100000000000000000000", "99999999999999999999",
    "99999999999999999999.9", "9.99999999999999999999", "-9.99999999999999999999", f"0.{'0' * 400}1", f"-0.{'0' * 400}1",
    "1.000000000000000000001", "2.00000000000000001", "9007199254740993.5", "9223372036854775807.5", "9223372036854775806.5",
)  # fmt: skip


@pytest.mark.parametrize("name", EXACTLY)
def test_just_the_valid_texts_can_be_written(name):
    """Of long ones with a point, some valid ones cannot."""
    schema = EXACTLY[name]
    valid = jsonschema.Draft202012Validator(schema).is_valid
    own = automaton(expression(schema), "")
    written = {text for text in TEXTS if accepts(own, text)}
    want = {text for text in TEXTS if valid(json.loads(text))}
    assert written and written <= want
    assert {text for text in want - written if "." not in text or len(text) < 15} == set()


NEVER = {
    "date": ("0000-01-01", "2023-02-29", "2024-04-31", "2024-13-01", "2024-1-01"), "address": ("256.0.0.1", "01.1.1.1"),
    "moment": ("2024-02-28 23:59:59Z", "2024-02-28T24:00:00Z", "2024-02-28T23:59:59"), "mail": ("a@b", "a@b..c", "@b.c"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER)
def test_formats_hold_nothing_else(name):
    own = automaton(expression(SCHEMAS[name][0]), "")
    assert not [text for text in NEVER[name] if accepts(own, f'"{text}"')]


REFUSED = {
    '{"type": "array", "uniqueItems": true}': "unsupported keyword: uniqueItems of items that are not listed",
    '{"additionalItems": false}': "unsupported keyword: additionalItems",
    '{"$dynamicRef": "#a"}': "unsupported keyword: $dynamicRef", '{"extends": {}}': "unsupported keyword: extends",
    '{"type": "string", "minLenght": 2}': "keyword: minLenght; minLength is one: if this is no misspelt minLength, name",
    '{"maxlength": 2}': "keyword: maxlength; maxLength is one", '{"ref": "#"}': "keyword: ref; $ref is one",
    '{"not": {"pattern": "a"}}': "unsupported keyword: not of pattern",
    '{"if": {"pattern": "a"}, "then": false}': "unsupported keyword: if (",
    '{"multipleOf": 0.01}': "unsupported keyword: multipleOf 0.01; integers above 0 are supported",
    '{"type": "object", "minProperties": 2}': "unsupported keyword: minProperties above 1 without as many properties",
    '{"type": "string", "pattern": "(?=a)b"}': "pattern '(?=a)b' has assert, which is not supported",
    '{"type": "string", "pattern": "a+b", "minLength": 3}': "unsupported keyword: pattern 'a+b' beside minLength or maxLength",
    '{"type": "string", "format": "email", "maxLength": 9}': "keyword: format 'email' beside minLength or maxLength",
    '{"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}': "unsupported keyword: oneOf of branches that may both hold",
    '{"type": "array", "items": [{}]}': "unsupported keyword: items as a list; prefixItems",
    '{"allOf": [{"pattern": "a"}, {"pattern": "b"}]}': "unsupported keyword: pattern, two of which hold at once",
    '{"allOf": [{"unevaluatedProperties": false, "anyOf": [{}]}, {}]}': "unevaluatedProperties beside parts that are joined",
    '{"$ref": "other.json"}': "$ref to 'other.json'; only parts of the schema itself", '{"$ref": "#/a"}': "no part '#/a'",
    '{"type": "number", "minimum": 0.5}': "minimum or maximum 0.5 of numbers; whole ones are supported",
    "false": "the schema allows no value", '{"type": "integer", "minimum": 2, "maximum": 1}': "the schema allows no value",
    '{"$ref": "#"}': "the schema allows no value",
    '{"type": "object", "required": ["a"], "properties": {"a": false}}': "allows no value",
    '{"type": "array", "minItems": 3, "items": false}': "allows no value",
    '{"enum": ["a"], "type": "integer"}': "allows no value",
    '{"type": "text"}': "the type 'text', which JSON does not have", '{"properties": 3}': "properties is 3, which it cannot",
    '{"required": [{}]}': "the schema's required holds {}, which is no name",
    '{"uniqueItems": "yes"}': "uniqueItems is 'yes', which it cannot be", '{"minItems": -1}': "minItems is -1, which it cannot",
    '{"minContains": -1}': "minContains is -1, which it cannot be", '{"if": 3}': "a part of the schema is 3",
    '{"not": {"enum": "abc"}}': "enum is 'abc', which it cannot be", '{"type": [{}]}': "the schema's type holds {}",
    '{"maximum": Infinity}': "maximum is inf, which it cannot be", '{"minimum": -1e999}': "minimum is -inf, which it cannot",
    '{"enum": [[1e999]]}': "enum is [[inf]], which it cannot be", '{"items": null}': "a part of the schema is None, and should",
    '{"minimum": 1e31}': "unsupported keyword: minimum 1e+31; bounds up to 1e+30", '{"minlen": 2}': "minlen; minLength is one",
    '{"type": "string", "nullable": true}': 'unsupported keyword: nullable; list the type instead: "type": [..., "null"]',
    '{"oneOf": [{"pattern": "a"}, {"pattern": "a+"}]}': "is supported (not of pattern)",
    '{"type": "string", "oneOf": [{"required": ["t"]}, {"required": ["t"]}]}': "allows no value",
    '{"oneOf": [{"maxProperties": 0, "properties": {"t": {"const": 1}}, "required": ["t"]}, {"maxProperties": 0, "properties": '
    '{"t": {"const": 2}}, "required": ["t"]}]}': "allows no value",
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
