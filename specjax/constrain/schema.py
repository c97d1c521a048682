"""From a JSON Schema (draft 2020-12) to a regular expression over JSON texts that are valid under it.

Every text that the expression matches is valid. Not every valid text matches:

- an object has its declared properties in their order, and others only if none is declared;
- there is at most one space, after a comma or a colon;
- a reference that leads back to itself is followed `DEPTH` times, and a value of any kind holds plain values;
- keywords of one type without the keyword `type` stand for that type;
- strings have no escapes `\\u`, and those with a limit no escapes at all.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from specjax.constrain.merging import MEANINGLESS, Unsupported, apart, canonical, merged
from specjax.constrain.numbers import FRACTION, integers, numbers
from specjax.constrain.pattern import CHARACTER, PLAIN, in_string
from specjax.constrain.regular import escaped

DEPTH = 3
"""How often a reference may lead back to itself."""
MOST_PARTS = 20_000
"""Parts of a schema, with its references written out."""
SPACE = " ?"
STRING = f'"{CHARACTER}*"'
INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}{FRACTION}(?:[eE][+-]?[0-9]+)?"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31))"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*@[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*(?:\.[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*)+",
}  # fmt: skip
"""The formats that are followed; a 29th of February is never written."""
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"), "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"), "integer": (),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "boolean": (), "null": (),
}  # fmt: skip
"""The keywords of each type; an integer has those of a number."""
KNOWN = {word for words in OF_TYPE.values() for word in words} | {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", *MEANINGLESS,
}  # fmt: skip


def expression(schema: Any) -> str:
    """The expression of a schema.

    Raises:
      ValueError: naming a keyword that is not supported; if the schema is malformed or allows nothing.
    """
    found = _Reader(schema).value(schema, ())
    if found is None:
        raise ValueError("the schema allows no value (of those that can be written)")
    return found


@dataclasses.dataclass
class _Reader:
    """Reads the parts of a schema. An expression that is None matches nothing.

    Attributes:
      root: the whole schema, for its references.
      parts: how many were read.
    """

    root: Any
    parts: int = 0

    def value(self, schema: Any, followed: tuple[str, ...]) -> str | None:
        """The expression of a part; `followed` are the references that led to it."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise ValueError(f"with its references written out, the schema has more than {MOST_PARTS} parts: nest less")
        schema, followed = self.flat(schema, followed)
        if schema is None:
            return None
        for word in ("anyOf", "oneOf"):
            if word in schema:
                rest = {name: own for name, own in schema.items() if name != word}
                branches = [self.flat(_merge(rest, one), followed) for one in _listed(schema, word)]
                branches = [one for one in branches if one[0] is not None]
                if word == "oneOf" and not apart([one for one, _ in branches]):
                    raise Unsupported("oneOf of branches that may both hold; anyOf, if that is meant, is supported")
                return either(self.value(one, own) for one, own in branches)
        if "enum" in schema or "const" in schema:
            return self.listed(schema)
        kinds: dict[str, Callable[..., str | None]] = {
            "object": self.object, "array": self.array, "string": self.string, "integer": self.integer,
            "number": self.number, "boolean": lambda *_: "true|false", "null": lambda *_: "null",
        }  # fmt: skip
        types = types_of(schema)
        if types is None:
            return self.anything(schema, followed)
        return either(kinds[kind](schema, followed) for kind in TYPES if kind in types)

    def flat(self, schema: Any, followed: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        """A part without references and `allOf`, and the references that led to it; None for one that allows nothing."""
        while True:
            if schema is True:
                return {}, followed
            if schema is False or schema is None:
                return None, followed
            _check(schema)
            if "$ref" in schema:
                name = schema["$ref"]
                if followed.count(name) > DEPTH:
                    return None, followed
                followed = (*followed, name)
                schema = _merge({word: own for word, own in schema.items() if word != "$ref"}, self.resolved(name))
            elif "allOf" in schema:
                parts, rest = _listed(schema, "allOf"), {word: own for word, own in schema.items() if word != "allOf"}
                for part in parts:
                    own, followed = self.flat(part, followed)
                    rest = _merge(rest, False if own is None else own)
                schema = rest
            else:
                return schema, followed

    def resolved(self, name: Any) -> Any:
        """The part that a reference names."""
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            raise Unsupported(f"$ref to {name!r:.40}; only #/... within the schema")
        found = self.root
        for step in name.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"the schema has no part {name!r:.60}, to which a $ref leads") from None
        return found

    def listed(self, schema: Mapping[str, Any]) -> str | None:
        """The values of `enum` or `const`."""
        if beside := schema.keys() - {"enum", "const", "type", *MEANINGLESS}:
            raise Unsupported(f"{min(beside)} beside enum or const")
        values = _listed(schema, "enum", empty=True) if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [own for own in values if canonical(own) == canonical(schema["const"])]
        types = types_of(schema)
        return either(literal(own) for own in values if types is None or any(is_of(own, kind) for kind in types))

    def anything(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        """A value of any type, whose parts are plain."""
        plain = f"(?:{STRING}|{NUMBER}|true|false|null)"
        return either([plain, _array([], plain, 0, None), _map(plain)])

    def object(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        properties, required = dict(schema.get("properties", {})), schema.get("required", [])
        extra = schema.get("additionalProperties", True)
        for name in required:
            properties.setdefault(name, extra)
        if not properties:
            value = self.value(extra, followed)
            return r"\{\}" if value is None else _map(value)
        parts = []
        for name, own in properties.items():
            value = self.value(own, followed)
            if value is None and name in required:
                return None
            if value is not None:
                parts.append((f"{literal(name)}:{SPACE}(?:{value})", name in required))
        return rf"\{{{_sequence(parts)}\}}"

    def array(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        first = _listed(schema, "prefixItems") if "prefixItems" in schema else []
        if isinstance(schema.get("items"), list):
            raise Unsupported("items as a list; prefixItems in draft 2020-12")
        least, most = _counts(schema, "minItems", "maxItems")
        parts: list[str] = []
        for own in first:
            value = self.value(own, followed)
            if value is None:
                most = len(parts) if most is None else min(most, len(parts))
                break
            parts.append(value)
        ends = most is not None and most <= len(parts)
        return _array(parts, None if ends else self.value(schema.get("items", True), followed), least, most)

    def string(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        least, most = _counts(schema, "minLength", "maxLength")
        given = [word for word in ("pattern", "format") if word in schema]
        if given and (len(given) > 1 or least or most is not None):
            raise Unsupported(f"{given[0]} beside {'format' if len(given) > 1 else 'minLength or maxLength'}")
        if "pattern" in schema:
            return f'"(?:{in_string(schema["pattern"])})"'
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise Unsupported(f"format {schema['format']!r:.40}; {', '.join(FORMATS)} are supported")
            return f'"{FORMATS[schema["format"]]}"'
        if most is not None and least > most:
            return None
        if not least and most is None:
            return STRING
        return f'"{PLAIN}{{{least},{"" if most is None else most}}}"'

    def integer(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        low, high, above, below = _bounds(schema)
        if low is None and high is None:
            return INTEGER
        return integers(
            low if low is None or not above else math.floor(low) + 1,
            high if high is None or not below else math.ceil(high) - 1,
        )

    def number(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        low, high, above, below = _bounds(schema)
        if low is None and high is None:
            return NUMBER
        if wrong := [one for one in (low, high) if one is not None and one != int(one)]:
            raise Unsupported(f"a bound of {wrong[0]} of numbers; whole ones are supported")
        whole = lambda bound: None if bound is None else int(bound)
        return numbers(whole(low), whole(high), above, below)


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


def either(found: Iterable[str | None]) -> str | None:
    """One of several expressions."""
    kept = list(dict.fromkeys(own for own in found if own is not None))
    return None if not kept else kept[0] if len(kept) == 1 else f"(?:{'|'.join(kept)})"


def literal(value: Any) -> str:
    """The expression of one value, with spaces where other values may have them."""
    if isinstance(value, dict):
        items = f",{SPACE}".join(f"{literal(name)}:{SPACE}{literal(own)}" for name, own in value.items())
        return rf"\{{{items}\}}"
    if isinstance(value, list):
        return rf"\[{f',{SPACE}'.join(map(literal, value))}\]"
    return escaped(json.dumps(value, ensure_ascii=False))


def _sequence(parts: Sequence[tuple[str, bool]]) -> str:
    """Parts with commas between them; those that are not required may be left out."""

    @functools.cache
    def after(at: int) -> str:
        """What may follow once a part has been written."""
        if at == len(parts):
            return ""
        own, required = parts[at]
        return (f",{SPACE}{own}" if required else f"(?:,{SPACE}{own})?") + after(at + 1)

    ways, at = [], 0
    for at, (own, required) in enumerate(parts):
        ways.append(own + after(at + 1))
        if required:
            return f"(?:{'|'.join(ways)})"
    return f"(?:{'|'.join(ways)})?"


def _array(first: Sequence[str], rest: str | None, least: int, most: int | None) -> str | None:
    """An array of some first values and others."""
    count = len(first)
    most = (count if most is None else min(most, count)) if rest is None else most
    if most is not None and least > most:
        return None
    first = first if most is None else first[:most]
    count = len(first)
    if rest is None or most == count:
        tail = ""
    elif count:
        tail = f"(?:,{SPACE}(?:{rest})){{{max(least - count, 0)},{'' if most is None else most - count}}}"
    else:
        tail = f"(?:{rest})(?:,{SPACE}(?:{rest})){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        tail = tail if least else f"(?:{tail})?"
    for at in reversed(range(count)):
        own = (f",{SPACE}" if at else "") + f"(?:{first[at]}){tail}"
        tail = own if at < least else f"(?:{own})?"
    return rf"\[{tail}\]"


def _map(value: str) -> str:
    """An object of any names with values of one kind."""
    item = f"{STRING}:{SPACE}(?:{value})"
    return rf"\{{(?:{item}(?:,{SPACE}{item})*)?\}}"


def _counts(schema: Mapping[str, Any], low: str, high: str) -> tuple[int, int | None]:
    return int(schema.get(low, 0)), int(schema[high]) if high in schema else None


def _bounds(schema: Mapping[str, Any]) -> tuple[float | None, float | None, bool, bool]:
    """The bounds of a number, and whether they are left out."""

    def tightest(kept: str, left_out: str, sign: int) -> tuple[float | None, bool]:
        found = [(sign * schema[word], strict) for word, strict in ((kept, False), (left_out, True)) if word in schema]
        return (None, False) if not found else (sign * max(found)[0], max(found)[1])

    low, above = tightest("minimum", "exclusiveMinimum", 1)
    high, below = tightest("maximum", "exclusiveMaximum", -1)
    return low, high, above, below


def _merge(schema: Any, other: Any) -> Any:
    """Both parts at once; False for one that allows nothing."""
    if schema is False or other is False:
        return False
    return merged(schema if isinstance(schema, dict) else {}, {} if other is True else _checked(other))


def _checked(schema: Any) -> Any:
    _check(schema)
    return schema


_MALFORMED = {
    "properties": dict, "required": list, "minLength": int, "maxLength": int, "minItems": int, "maxItems": int, "pattern": str,
    "minimum": (int, float), "maximum": (int, float), "exclusiveMinimum": (int, float), "exclusiveMaximum": (int, float),
    "type": (str, list), "format": str,
}  # fmt: skip


def _check(schema: Any) -> None:
    """Raises ValueError on a part that is no schema, and on keywords that are not supported."""
    if not isinstance(schema, dict):
        raise ValueError(f"a part of the schema is {schema!r:.40}, and should be an object, true or false")
    if unknown := [word for word in schema if word not in KNOWN]:
        raise Unsupported(unknown[0])
    for word, kind in _MALFORMED.items():
        own = schema.get(word)
        whole = kind is int and isinstance(own, float) and own.is_integer()
        if word in schema and (isinstance(own, bool) or not isinstance(own, kind) and not whole):
            raise ValueError(f"the schema's {word} is {own!r:.40}, which it cannot be")
    if wrong := [name for name in schema.get("required", []) if not isinstance(name, str)]:
        raise ValueError(f"the schema's required holds {wrong[0]!r:.40}, which is no name")


def _listed(schema: Mapping[str, Any], word: str, empty: bool = False) -> list[Any]:
    found = schema[word]
    if not isinstance(found, list) or not found and not empty:
        raise ValueError(f"the schema's {word} is {found!r:.40}, and should be a list")
    return found
