"""The keywords of JSON Schemas: which are followed, which say nothing, and which are refused, for they forbid something."""

import difflib
import math
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
    "contentSchema", "id", "note",
))  # fmt: skip
"""Keywords that allow and forbid nothing."""
REFUSED = dict.fromkeys((
    "$dynamicRef", "$recursiveRef", "$recursiveAnchor", "additionalItems", "disallow", "divisibleBy", "extends",
    "formatMaximum", "formatMinimum", "formatExclusiveMaximum", "formatExclusiveMinimum", "minimumCanEqual", "maximumCanEqual",
), "") | {"nullable": '; list the type instead: "type": [..., "null"]'}  # fmt: skip
"""Keywords of this draft, older ones and extensions that change what is allowed and are not followed, with advice."""
KNOWN = frozenset(word for words in OF_TYPE.values() for word in words) | PARTS | {"type", "enum", "const"}
_NEAR = {word.lower(): word for word in KNOWN | REFUSED.keys()}
_NEAR |= {"min": "minimum", "max": "maximum", "minlen": "minLength", "maxlen": "maxLength"}
_ALIKE = 0.85
"""How alike two words are of which one is taken for the other, misspelt; 1 for equal ones."""


class Unsupported(ValueError):
    """A keyword, or two that stand together, that cannot be followed; the message begins with it."""

    def __init__(self, what: str):
        super().__init__(f"the schema has an unsupported keyword: {what}")
        self.what = what


_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_MALFORMED = {
    **dict.fromkeys(("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"), dict),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (int, float)),
    **dict.fromkeys(_COUNTS, int),
    "required": list, "enum": list, "pattern": str, "type": (str, list), "format": str, "$ref": str, "uniqueItems": bool,
}  # fmt: skip


def check(schema: Any) -> None:
    """Raises ValueError on a part that is no schema, and on keywords that are not followed. Others say nothing."""
    if not isinstance(schema, dict):
        raise ValueError(f"a part of the schema is {schema!r:.40}, and should be an object, true or false")
    for word, own in schema.items():
        if word not in KNOWN and word not in MEANINGLESS:
            _check_unknown(word, own)
        if word in _MALFORMED and not _is_formed(word, own) or word in ("enum", "const") and not _is_finite(own):
            raise ValueError(f"the schema's {word} is {own!r:.40}, which it cannot be")
    if isinstance(schema.get("type"), list) and (wrong := [own for own in schema["type"] if not isinstance(own, str)]):
        raise ValueError(f"the schema's type holds {wrong[0]!r:.40}, which is no name")
    if wrong := [name for name in schema.get("required", []) if not isinstance(name, str)]:
        raise ValueError(f"the schema's required holds {wrong[0]!r:.40}, which is no name")


def _is_formed(word: str, own: Any) -> bool:
    """Whether a keyword has a value of the kind that it needs."""
    kind = _MALFORMED[word]
    if isinstance(own, bool) or kind is bool:
        return kind is bool and isinstance(own, bool)
    if isinstance(own, float) and (kind is int and not own.is_integer() or not math.isfinite(own)):
        return False
    return own >= 0 if word in _COUNTS and isinstance(own, int | float) else isinstance(own, kind)


def _is_finite(value: Any) -> bool:
    """Whether JSON can write a value: it has no infinity."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _check_unknown(word: str, own: Any) -> None:
    """The draft passes over unknown keywords. A misspelt one would then allow what its writer wanted to forbid."""
    if word == "nullable" and own is False:
        return
    if word in REFUSED:
        raise Unsupported(word + REFUSED[word])
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
