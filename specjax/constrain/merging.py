"""Two parts of a JSON Schema that hold at once, as one part; and parts of which no two hold at once."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.constrain.opposite import FRACTIONAL, NEGATED, is_plain
from specjax.constrain.words import KNOWN, OF_TYPE, Unsupported, check

MOST_WAYS = 128
"""Branches of two `anyOf` that hold at once."""
_LARGER = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))
_SMALLER = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))
_WITHIN = frozenset(("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies"))
"""Keywords whose parts evaluate properties and items of the same value."""
_OF_OTHERS = {word for kind, words in OF_TYPE.items() for word in words if kind != "object"} | {"enum", "const"}
"""Keywords that tell values apart which are no objects."""
_KEPT = KNOWN | {NEGATED, FRACTIONAL}
_REST = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}


def merge(schema: Any, other: Any) -> Any:
    """A part that allows what both allow; False for nothing.

    What the other part leaves unevaluated is settled in it alone. What the first does is open until all parts are joined.

    Raises:
      Unsupported: if no one part says that.
    """
    if schema is False or other is False:
        return False
    if other is True:
        return schema
    check(other)
    return _merged(schema, settled(other))


def joined(rest: Mapping[str, Any], other: Any) -> Any:
    """`merge`, or the other part as it is if the first says nothing."""
    return merge(rest, other) if any(word in _KEPT for word in rest) else other


def settled(schema: Mapping[str, Any], last: bool = False) -> Mapping[str, Any]:
    """A part without `unevaluatedProperties` and `unevaluatedItems`: the same for all others that its keywords leave.

    Args:
      schema: the part.
      last: whether parts below have become keywords of this one, except for branches that are not joined any more.
    """
    found = dict(schema)
    for word, rest in _REST.items():
        if word not in schema:
            continue
        if found[word] is not True and (NEGATED in schema or not last and schema.keys() & _WITHIN):
            raise Unsupported(f"{word} beside parts that are joined with others")
        found.setdefault(rest, found.pop(word))
        found.pop(word, None)
    return found


def _merged(schema: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    one, two = _cleaned(schema), _cleaned(other)
    found = one | two
    for word in one.keys() & two.keys() - _TOGETHER:
        found[word] = _both(word, one[word], two[word])
    if "contains" in one and "contains" in two and any(one.get(word) != two.get(word) for word in _CONTAINS):
        raise Unsupported("contains, two of which hold at once")
    return found | _properties(one, two) | _items(one, two)


_CONTAINS = ("contains", "minContains", "maxContains")
_TOGETHER = frozenset(("properties", "patternProperties", "additionalProperties", "prefixItems", "items", *_CONTAINS))
"""Keywords that are joined with those on which they depend."""


def _cleaned(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A part without what says nothing, also without its keyword, and with a constant as a list of one."""
    found = {word: own for word, own in schema.items() if word in _KEPT}
    for word, leaders in (("then", "if"), ("else", "if"), ("minContains", "contains"), ("maxContains", "contains")):
        if leaders not in found:
            found.pop(word, None)
    if "const" in found:
        own = [found.pop("const")]
        found["enum"] = _both("enum", found["enum"], own) if "enum" in found else own
    return found


def both(*parts: Any) -> Any:
    """A part that says what several say."""
    kept = [own for own in parts if own is not True]
    return kept[0] if len(kept) == 1 else False if False in kept else {"allOf": kept} if kept else True


def matched(patterns: Mapping[str, Any], name: str) -> list[Any]:
    """The schemas of the patterns that a property's name matches.

    Raises:
      Unsupported: if ECMA-262 and Python may see the name differently.
    """
    if patterns and not (name.isascii() and name.isprintable()):
        raise Unsupported(f"patternProperties beside the property {name!r:.40}, which is not of ASCII's signs")
    try:
        return [own for pattern, own in patterns.items() if re.search(pattern, name)]
    except re.error as error:
        raise ValueError(f"a pattern of patternProperties is no expression: {error}") from error


def _said(schema: Mapping[str, Any], name: str) -> Any:
    """What a part says of a property."""
    own = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    own += matched(schema.get("patternProperties", {}), name)
    return both(*own) if own else schema.get("additionalProperties", True)


def _properties(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """What both say of each name; of names that match patterns of one part alone, also what the other says of the rest."""
    found: dict[str, Any] = {}
    if names := dict.fromkeys([*one.get("properties", {}), *two.get("properties", {})]):
        found["properties"] = {name: both(_said(one, name), _said(two, name)) for name in names}
    rests = [each.get("additionalProperties", True) for each in (one, two)]
    patterns = [each.get("patternProperties", {}) for each in (one, two)]
    if either := dict.fromkeys([*patterns[0], *patterns[1]]):
        found["patternProperties"] = {
            pattern: both(*(own.get(pattern, rest) for own, rest in zip(patterns, rests, strict=True)))
            for pattern in either
        }
    if "additionalProperties" in one or "additionalProperties" in two:
        found["additionalProperties"] = both(*rests)
    return found


def _items(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """What both say of each item."""
    firsts, rests = (
        [each.get("prefixItems", []) for each in (one, two)],
        [each.get("items", True) for each in (one, two)],
    )
    found: dict[str, Any] = {}
    if count := max(map(len, firsts)):
        found["prefixItems"] = [
            both(*(own[at] if at < len(own) else rest for own, rest in zip(firsts, rests, strict=True)))
            for at in range(count)
        ]
    if "items" in one or "items" in two:
        found["items"] = both(*rests)
    return found


def _both(word: str, own: Any, other: Any) -> Any:
    if own == other and json.dumps(own) == json.dumps(other):
        return own
    if word in _LARGER:
        return max(own, other)
    if word in _SMALLER:
        return min(own, other)
    if word == "required":
        return list(dict.fromkeys([*own, *other]))
    if word == "type":
        return _types(*([each] if isinstance(each, str) else each for each in (own, other)))
    if word == "enum":
        texts = [canonical(each) for each in other]
        return [each for each in own if canonical(each) in texts]
    if word == "not":
        plain = is_plain(own) and is_plain(other)
        return {"enum": [*own["enum"], *other["enum"]]} if plain else {"anyOf": [own, other]}
    if word == "anyOf" and len(own) * len(other) <= MOST_WAYS:
        return [both(*pair) for pair in itertools.product(own, other)]
    if word == "propertyNames":
        return both(own, other)
    if word == "uniqueItems":
        return own or other
    if word == "multipleOf" and all(isinstance(each, int) and each > 0 for each in (own, other)):
        return math.lcm(own, other)
    raise Unsupported(f"{word}, two of which hold at once")


def _types(own: Sequence[str], other: Sequence[str]) -> list[str]:
    wide = lambda types: {*types, *(["integer"] if "number" in types else [])}
    return sorted(wide(own) & wide(other))


def exclusive(branches: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]] | None:
    """The parts as those of which no two hold at once; None if that is not plain.

    Their types tell, their values, or those of a required property. A property tells only of objects. Where all parts have
    the same types and keywords of objects alone, more than one holds for any other value: they become parts of objects.
    """
    if apart(branches):
        return branches
    kinds = [set(_named(each)) for each in branches]
    other = any(own != kinds[0] for own in kinds) or any(_OF_OTHERS & each.keys() for each in branches)
    if other or kinds[0] and "object" not in kinds[0]:
        return None
    objects = [{**each, "type": "object"} for each in branches]
    return objects if apart(objects) else None


def apart(branches: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is plain that no two parts hold at once."""
    return all(_apart(one, two) for one, two in itertools.combinations(branches, 2))


def _apart(one: Any, two: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(two, dict)):
        return False
    if any(_apart(part, two) for part in one.get("allOf", [])) or any(
        _apart(one, part) for part in two.get("allOf", [])
    ):
        return True
    types = [_named(each) for each in (one, two)]
    if all(types) and not _types(*types):
        return True
    own, other = _values(one), _values(two)
    if own is not None and other is not None:
        return not set(own) & set(other)
    if not types[0] == types[1] == ["object"]:
        return False
    shared = set(one.get("required", [])) & set(two.get("required", []))
    ours, theirs = one.get("properties", {}), two.get("properties", {})
    return any(name in ours and name in theirs and _apart(ours[name], theirs[name]) for name in shared)


def _named(schema: Mapping[str, Any]) -> list[str]:
    if "type" not in schema:
        return sorted({_type(own) for own in _raw(schema) or []})
    return [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])


def _raw(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a part that lists them, so that equal ones compare equal; None for another part."""
    raw = _raw(schema)
    return None if raw is None else [canonical(own) for own in raw]


def canonical(value: Any) -> str:
    """A text that is the same for equal JSON values."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(own) for name, own in value.items()}
    if isinstance(value, list):
        return [_whole(own) for own in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {dict: "object", list: "array", str: "string", int: "number", float: "number", type(None): "null"}
    return kinds[type(value)]
