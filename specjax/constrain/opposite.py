"""The opposite of a part of a JSON Schema, as another part: what holds if and only if the part does not.

By De Morgan: a part fails if one of its keywords does, and a keyword fails only for a value of its type. A list of values
that is forbidden stays `{"not": {"enum": [...]}}`, which the types' own expressions follow.
"""

from collections.abc import Callable, Mapping
from typing import Any

from specjax.constrain.words import KNOWN, TYPES, Unsupported, check

NEGATED = "x-negated"
"""Marks a part that is an opposite: what it evaluates counts for no `unevaluatedProperties`."""
FRACTIONAL = "x-fractional"
"""Marks numbers that are no integers."""
DEPTH = 16
"""How deep the parts of an opposite may be, with its references."""
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0), "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1), "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip
"""The type, the opposite and what is added to it, for each bound."""


def is_plain(schema: Any) -> bool:
    """Whether what stands under `not` is a list of values alone."""
    return isinstance(schema, dict) and schema.keys() == {"enum"} and isinstance(schema["enum"], list)


def negated(schema: Any, resolve: Callable[[str], Any], depth: int = 0) -> Any:
    """The opposite of a part.

    Args:
      schema: the part.
      resolve: gives the part to which a reference leads.
      depth: of the parts above.

    Raises:
      Unsupported: if it has a keyword whose opposite cannot be followed.
    """
    if isinstance(schema, bool):
        return not schema
    check(schema)
    if depth > DEPTH:
        raise Unsupported(f"not of parts that nest more than {DEPTH} times")
    ways = []
    for word in schema:
        if word in KNOWN or word in (NEGATED, FRACTIONAL):
            ways += _ways(word, schema, lambda own: negated(own, resolve, depth + 1), resolve)
    ways = [own for own in ways if own is not False]
    return {"anyOf": ways, NEGATED: True} if ways else False


def _ways(
    word: str, schema: Mapping[str, Any], opposite: Callable[[Any], Any], resolve: Callable[[str], Any]
) -> list[Any]:
    """The parts of which one holds if a keyword of a part does not."""
    own = schema[word]
    if word in _BOUNDS:
        kind, other, more = _BOUNDS[word]
        return [{"type": kind, other: own + more}] if own + more >= 0 or kind == "number" else []
    if word == NEGATED:
        return []
    if word == "type":
        types = {own} if isinstance(own, str) else set(own)
        ways: list[Any] = [{"type": [kind for kind in TYPES if kind not in types | {"integer", "number"}]}]
        if "number" not in types:
            ways.append({"type": "number", FRACTIONAL: True} if "integer" in types else {"type": "number"})
        return ways
    if word in ("enum", "const"):
        return [{"not": {"enum": own if word == "enum" else [own]}}]
    if word == "required":
        return [{"type": "object", "properties": {name: False}} for name in own]
    if word == "properties":
        return [
            {"type": "object", "required": [name], "properties": {name: opposite(each)}} for name, each in own.items()
        ]
    if word == "not":
        return [own]
    if word == "allOf":
        return [opposite(each) for each in own]
    if word == "anyOf":
        return [{"allOf": [opposite(each) for each in own]}]
    if word == "$ref":
        return [opposite(resolve(own))]
    if word == "items" and "prefixItems" not in schema:
        return [{"type": "array", "contains": opposite(own)}]
    if word == "contains" and not schema.keys() & {"minContains", "maxContains"}:
        return [{"type": "array", "items": opposite(own)}]
    says_nothing = (
        own is True and word.startswith(("additional", "unevaluated")) or own is False and word == "uniqueItems"
    )
    if says_nothing or word in ("then", "else") and "if" not in schema:
        return []
    raise Unsupported(f"not of {word}")
