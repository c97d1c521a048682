"""The keywords of JSON Schemas: which are followed, which say nothing, and which are refused, for they forbid something."""

import difflib
from collections.abc import Mapping
from typing import Any

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
OF_TYPE = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    ),
    "array": (
        "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains",
        "unevaluatedItems",
    ),
    "string": ("minLength", "maxLength", "pattern", "format"), "integer": (),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "boolean": (), "null": (),
}  # fmt: skip
"""The keywords of each type; an integer has those of a number."""
PARTS = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref"))
"""Keywords that join parts."""
MEANINGLESS = frozenset((
    "title", "description", "default", "examples", "$schema", "$id", "$anchor", "$dynamicAnchor", "$comment", "$defs",
    "$vocabulary", "definitions", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
    "contentSchema", "id",
))  # fmt: skip
"""Keywords that allow and forbid nothing."""
REFUSED = frozenset((
    "$dynamicRef", "$recursiveRef", "$recursiveAnchor", "additionalItems", "disallow", "divisibleBy", "extends",
    "formatMaximum", "formatMinimum", "formatExclusiveMaximum", "formatExclusiveMinimum", "minimumCanEqual", "maximumCanEqual",
))  # fmt: skip
"""Keywords of this draft, older ones and well-known extensions that forbid something and are not followed."""
KNOWN = frozenset(word for words in OF_TYPE.values() for word in words) | PARTS | {"type", "enum", "const"}
_NEAR = {word.lower(): word for word in KNOWN | REFUSED}
_ALIKE = 0.85
"""How alike two words are of which one is taken for the other, misspelt; 1 for equal ones."""


class Unsupported(ValueError):
    """A keyword, or two that stand together, that cannot be followed; the message begins with it."""

    def __init__(self, what: str):
        super().__init__(f"the schema has an unsupported keyword: {what}")


_MALFORMED = {
    **dict.fromkeys(("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"), dict),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), int),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (int, float)),
    "required": list, "pattern": str, "minContains": int, "maxContains": int, "type": (str, list), "format": str, "$ref": str,
}  # fmt: skip


def check(schema: Any) -> None:
    """Raises ValueError on a part that is no schema, and on keywords that are not followed. Others say nothing."""
    if not isinstance(schema, dict):
        raise ValueError(f"a part of the schema is {schema!r:.40}, and should be an object, true or false")
    for word in schema:
        if word not in KNOWN and word not in MEANINGLESS:
            _check_unknown(word)
    for word in schema.keys() & _MALFORMED.keys():
        own, kind = schema[word], _MALFORMED[word]
        whole = kind is int and isinstance(own, float) and own.is_integer()
        if isinstance(own, bool) or not isinstance(own, kind) and not whole:
            raise ValueError(f"the schema's {word} is {own!r:.40}, which it cannot be")
    if wrong := [name for name in schema.get("required", []) if not isinstance(name, str)]:
        raise ValueError(f"the schema's required holds {wrong[0]!r:.40}, which is no name")


def _check_unknown(word: str) -> None:
    """The draft passes over unknown keywords. A misspelt one would then allow what its writer wanted to forbid."""
    if word in REFUSED:
        raise Unsupported(word)
    if word.startswith("x-"):
        return
    if near := difflib.get_close_matches(word.lower(), _NEAR, 1, _ALIKE):
        raise Unsupported(f"{word}; {_NEAR[near[0]]} is one: if this is no misspelt {_NEAR[near[0]]}, name it x-{word}")


def types_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types of a part: those that it names, or those whose keywords it has; None for any."""
    named = schema.get("type")
    if named is None:
        implied = {kind for kind, words in OF_TYPE.items() if any(word in schema for word in words)}
        return implied or None
    types = {named} if isinstance(named, str) else set(named)
    if unknown := types - set(TYPES):
        raise ValueError(f"the schema names the type {min(unknown)!r:.40}, which JSON does not have")
    return types - ({"integer"} if "number" in types else set())


def is_of(value: Any, kind: str) -> bool:
    """Whether a value has a type."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float):
        return kind == "number" or kind == "integer" and value.is_integer()
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int, "null": type(None)}
    return kind in kinds and isinstance(value, kinds[kind])


def listed(schema: Mapping[str, Any], word: str, empty: bool = False) -> list[Any]:
    """The list that a keyword has.

    Raises:
      ValueError: if it has none, or an empty one where that is not allowed.
    """
    found = schema[word]
    if not isinstance(found, list) or not found and not empty:
        raise ValueError(f"the schema's {word} is {found!r:.40}, and should be a list")
    return found
