"""Two parts of a JSON Schema that hold at once, as one part; and parts of which no two hold at once."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

MEANINGLESS = frozenset((
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated",
    "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
))  # fmt: skip
"""Keywords that allow and forbid nothing."""
_LARGER = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems"))
_SMALLER = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems"))


class Unsupported(ValueError):
    """A keyword, or two that stand together, that cannot be followed; the message begins with it."""

    def __init__(self, what: str):
        super().__init__(f"the schema has an unsupported keyword: {what}")


def merged(schema: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A part that allows what both allow.

    Raises:
      Unsupported: if no one part says that.
    """
    one, two = ({word: own for word, own in each.items() if word not in MEANINGLESS} for each in (schema, other))
    _check_closed(one, two)
    _check_closed(two, one)
    found = one | two
    for word in one.keys() & two.keys():
        found[word] = _both(word, one[word], two[word])
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
    if word == "properties":
        shared = {name: {"allOf": [own[name], other[name]]} for name in own.keys() & other.keys()}
        return {**own, **other, **shared}
    if word == "enum":
        texts = [canonical(each) for each in other]
        return [each for each in own if canonical(each) in texts]
    raise Unsupported(f"two of {word} that hold at once")


def _types(own: Sequence[str], other: Sequence[str]) -> list[str]:
    wide = lambda types: {*types, *(["integer"] if "number" in types else [])}
    return sorted(wide(own) & wide(other))


def _check_closed(schema: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises Unsupported if what a part says of other properties is about properties of the other part."""
    named = {*other.get("properties", {}), *other.get("required", [])}
    open = schema.get("additionalProperties", True) is True
    if not open and (named - set(schema.get("properties", {})) or "additionalProperties" in other):
        raise Unsupported("additionalProperties beside properties of another part")
    if len(schema.get("prefixItems", [])) and "items" in other and "prefixItems" not in other:
        raise Unsupported("items beside prefixItems of another part")


def apart(branches: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is plain that no two parts hold at once: by their types, their values or those of a required property."""
    return all(_apart(one, two) for one, two in itertools.combinations(branches, 2))


def _apart(one: Any, two: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(two, dict)):
        return False
    types = [_named(each) for each in (one, two)]
    if all(types) and not _types(*types):
        return True
    own, other = _values(one), _values(two)
    if own is not None and other is not None:
        return not set(own) & set(other)
    if not (types[0] == types[1] == ["object"] or all("properties" in each for each in (one, two))):
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
