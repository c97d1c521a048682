"""From a JSON Schema (draft 2020-12) to a regular expression over JSON texts that are valid under it.

Every text that the expression matches is valid. Not every valid text matches:

- an object has its declared properties in their order, and others only if none is declared;
- there is at most one space, after a comma or a colon;
- a reference that leads back to itself is followed `DEPTH` times, and a value of any kind holds plain values;
- keywords of one type without the keyword `type` stand for that type;
- strings have no escapes `\\u`, and those with a limit no escapes at all.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from specjax.constrain.members import SPACE, array, containing, counted, sequence
from specjax.constrain.merging import both, canonical, exclusive, joined, matched, merge, settled
from specjax.constrain.numbers import FRACTION, LARGEST, fraction, integers, multiples, numbers
from specjax.constrain.opposite import FRACTIONAL, is_plain, negated
from specjax.constrain.pattern import PLAIN, begins, in_string, widths
from specjax.constrain.references import pointed
from specjax.constrain.regular import automaton, escaped
from specjax.constrain.texts import FORMATS, STRING, differing
from specjax.constrain.words import OF_TYPE, TYPES, Unsupported, check, is_of, listed, types_of

DEPTH = 3
"""How often a reference may lead back to itself."""
MOST_PARTS = 20_000
"""Parts of a schema, with its references written out."""
MOST_BRANCHES = 12
"""Branches of `oneOf` that may hold together."""
MOST_LISTS = 1000
"""Lists of different items that are written out."""
MOST_PERMUTED = 4
"""Values of different items that come in any order; more come in the schema's order."""
INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}{FRACTION}(?:[eE][+-]?[0-9]+)?"


def expression(schema: Any) -> str:
    """The expression of a schema.

    Raises:
      ValueError: naming a keyword that is not supported; if the schema is malformed or allows nothing.
    """
    root = pointed(schema)
    found = _Reader(root).value(root, ())
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
                return either(self.value(one, own) for one, own in self.branches(schema, word, followed))
        schema = settled(schema, last=True)
        if "enum" in schema or "const" in schema:
            return self.listed(schema, followed)
        kinds: dict[str, Callable[..., str | None]] = {
            "object": self.object, "array": self.array, "string": self.string, "integer": self.integer,
            "number": self.number, "boolean": self.boolean, "null": self.null,
        }  # fmt: skip
        types, forbidden = types_of(schema), _forbidden(schema)
        if types is None and not forbidden:
            return anything()
        nested = {kind for kind in ("object", "array") if any(is_of(own, kind) for own in forbidden)}
        ways = lambda some: either(kinds[kind](schema, followed) for kind in TYPES if kind in some - nested)
        found = ways(set(TYPES) if types is None else types)
        return ways(set(TYPES) - (types or set())) if found is None and "type" not in schema else found

    def branches(
        self, schema: Mapping[str, Any], word: str, followed: tuple[str, ...]
    ) -> list[tuple[Any, tuple[str, ...]]]:
        """The parts of which one holds, each with all else that holds."""
        rest, given = {name: own for name, own in schema.items() if name != word}, listed(schema, word)
        found = [self.flat(joined(rest, one), followed) for one in given]
        found = [one for one in found if one[0] is not None]
        if word == "anyOf":
            return found
        if (plain := exclusive([one for one, _ in found])) is not None:
            return [(one, own) for one, (_, own) in zip(plain, found, strict=True)]
        if len(given) > MOST_BRANCHES:
            raise Unsupported(f"oneOf of more than {MOST_BRANCHES} branches that may both hold")
        try:
            alone = [
                both(one, *({"not": other} for i, other in enumerate(given) if i != at)) for at, one in enumerate(given)
            ]
            found = [self.flat(joined(rest, one), followed) for one in alone]
        except Unsupported as error:
            raise Unsupported(
                f"oneOf of branches that may both hold; anyOf, if that is meant, is supported ({error.what})"
            ) from error
        return [one for one in found if one[0] is not None]

    def flat(self, schema: Any, followed: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        """A part without references and joined parts, and the references that led to it; None for one that allows nothing.

        It keeps `anyOf`, `oneOf` and lists of forbidden values.
        """
        while True:
            if schema is True:
                return {}, followed
            if schema is False:
                return None, followed
            check(schema)
            word = next((word for word in _JOINED if word in schema), None)
            if word is None or word == "not" and is_plain(schema["not"]):
                return schema, followed
            rest, own = {name: one for name, one in schema.items() if name != word}, schema[word]
            if word == "$ref":
                if followed.count(own) > DEPTH:
                    return None, followed
                followed = (*followed, own)
                schema = joined(rest, self.resolved(own))
            elif word == "allOf":
                parts = listed(schema, "allOf")
                if len(parts) == 1:
                    schema = joined(rest, parts[0])
                    continue
                for part in parts:
                    one, followed = self.flat(part, followed)
                    rest = merge(rest, False if one is None else one)
                schema = rest
            else:
                said = self.said(word, own, rest)
                schema = {**rest, "allOf": [said]}

    def said(self, word: str, own: Any, rest: dict[str, Any]) -> Any:
        """What a keyword that joins parts says, with fewer such keywords."""
        if word == "not":
            return negated(own, self.resolved)
        if word == "if":
            then, other = rest.pop("then", True), rest.pop("else", True)
            if then is True and other is True:
                if not isinstance(own, bool):
                    check(own)
                return True
            try:
                return {"anyOf": [both(own, then), both(negated(own, self.resolved), other)]}
            except Unsupported as error:
                raise Unsupported(f"if ({error.what})") from error
        needed = lambda one: {"required": one} if isinstance(one, list) else one
        ways = [
            {"anyOf": [{"properties": {name: False}}, both({"required": [name]}, needed(one))]}
            for name, one in own.items()
        ]
        return both(*ways)

    def resolved(self, name: Any) -> Any:
        """The part that a reference names."""
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            raise Unsupported(f"$ref to {name!r:.40}; only parts of the schema itself")
        found = self.root
        for step in name.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"the schema has no part {name!r:.60}, to which a $ref leads") from None
        return found

    def listed(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        """The values of `enum` or `const` that the other keywords allow."""
        values = listed(schema, "enum", empty=True) if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [own for own in values if canonical(own) == canonical(schema["const"])]
        types = types_of({"type": schema["type"]}) if "type" in schema else None
        values = [own for own in values if types is None or any(is_of(own, kind) for kind in types)]
        values = [own for own in values if self._may(schema, own)]
        if FRACTIONAL in schema:
            values = [own for own in values if not is_of(own, "integer")]
        rest = {word: schema[word] for words in OF_TYPE.values() for word in words if word in schema}
        return either(literal(own) for own in values if not rest or self.holds(rest, own, followed))

    def holds(self, schema: Mapping[str, Any], value: Any, followed: tuple[str, ...]) -> bool:
        """Whether a value can be written under a part."""
        kind = next(kind for kind in TYPES if is_of(value, kind))
        found = self.value({**schema, "type": kind}, followed)
        try:
            return found is not None and automaton(found, "").holds(json.dumps(value, ensure_ascii=False).encode())
        except ValueError as error:
            raise Unsupported(f"{min(schema)} beside enum or const, whose automaton is too large") from error

    def object(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        properties, required = dict(schema.get("properties", {})), schema.get("required", [])
        extra, patterns = schema.get("additionalProperties", True), schema.get("patternProperties", {})
        least, most = _counts(schema, "minProperties", "maxProperties")
        for name in required:
            properties.setdefault(name, True if matched(patterns, name) else extra)
        parts, names = [], schema.get("propertyNames", True)
        for name, own in properties.items():
            allowed = (
                names is True or names is not False and self.value(both(names, {"enum": [name]}), followed) is not None
            )
            value = self.value(both(own, *matched(patterns, name)), followed) if allowed else None
            if value is None and name in required:
                return None
            if value is not None:
                parts.append((f"{literal(name)}:{SPACE}(?:{value})", name in required))
        open = patterns or all(own is False for own in properties.values())
        tail = self.others(schema, properties, followed) if open else None
        if not patterns and parts and least > len(parts) and extra is not False:
            raise Unsupported("minProperties above the number of named properties")
        found = sequence(parts, tail, least, most)
        return None if found is None else rf"\{{{found}\}}"

    def others(self, schema: Mapping[str, Any], named: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        """A property of a name that is not declared."""
        patterns, names = schema.get("patternProperties", {}), schema.get("propertyNames", True)
        if patterns and names is not True:
            raise Unsupported("propertyNames beside patternProperties")
        if patterns:
            return self.matching(
                {one: own for one, own in patterns.items() if not any(matched({one: own}, n) for n in named)}, followed
            )
        if names is True:
            key = f'"{differing(named)}"' if named else STRING
        elif named:
            raise Unsupported("propertyNames beside properties of which none can be written")
        else:
            key = self.value(both({"type": "string"}, names), followed)
        value = self.value(schema.get("additionalProperties", True), followed)
        return None if key is None or value is None else f"(?:{key}):{SPACE}(?:{value})"

    def matching(self, patterns: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        """A property whose name matches one of some patterns. Where names may match two, values obey all."""
        starts = [begins(one) for one in patterns]
        clear = not any(a.startswith(b) or b.startswith(a) for a, b in itertools.combinations(starts, 2))
        shared = None if clear else self.value(both(*patterns.values()), followed)
        if not clear and shared is None:
            raise Unsupported("patternProperties of which two may match one name")
        ways = []
        for pattern, own in patterns.items():
            value = self.value(own, followed) if clear else shared
            if value is not None:
                ways.append(f'"(?:{in_string(pattern)})":{SPACE}(?:{value})')
        return f"(?:{either(ways)})" if ways else None

    def array(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        first, rest = (
            listed(schema, "prefixItems", empty=True) if "prefixItems" in schema else [],
            schema.get("items", True),
        )
        if isinstance(rest, list):
            raise Unsupported("items as a list; prefixItems in draft 2020-12")
        least, most = _counts(schema, "minItems", "maxItems")
        if schema.get("uniqueItems") is True and (most is None or most > 1):
            if "contains" in schema:
                raise Unsupported("uniqueItems beside contains")
            return self.different(first, rest, least, most, followed)
        if "contains" in schema:
            return self.containing(schema, first, rest, (least, most), followed)
        parts: list[str] = []
        for own in first:
            value = self.value(own, followed)
            if value is None:
                most = len(parts) if most is None else min(most, len(parts))
                break
            parts.append(value)
        ends = most is not None and most <= len(parts)
        return array(parts, None if ends else self.value(rest, followed), least, most)

    def containing(
        self,
        schema: Mapping[str, Any],
        first: list[Any],
        rest: Any,
        counts: tuple[int, int | None],
        followed: tuple[str, ...],
    ) -> str | None:
        """An array with items of some kind."""
        least, most = counts
        low, high = _counts(schema, "minContains", "maxContains")
        low = low if "minContains" in schema else 1
        kind = schema["contains"]
        if high is None and low == 0:
            return self.array({word: own for word, own in schema.items() if word != "contains"}, followed)
        if first:
            raise Unsupported("contains beside prefixItems")
        found = self.value(both(rest, kind), followed)
        if high is None:
            item = self.value(rest, followed)
            return None if found is None or item is None else containing(item, found, least, most, low)
        if least or most is not None:
            raise Unsupported("maxContains beside minItems or maxItems")
        plain = {"type": [own for own in TYPES if own not in ("object", "array")]} if rest is True else True
        return counted(self.value(both(rest, plain, {"not": kind}), followed), found, low, high)

    def different(
        self, first: list[Any], rest: Any, least: int, most: int | None, followed: tuple[str, ...]
    ) -> str | None:
        """An array of different items, of kinds that have few values."""
        kinds = [self.values(own, followed) for own in first]
        others = [] if rest is False or most is not None and most <= len(first) else self.values(rest, followed)
        if not first and len(others) > MOST_PERMUTED:
            found = sequence([(literal(own), False) for own in others], None, least, most)
            return None if found is None else rf"\[{found}\]"
        lists: list[str] = []
        row: list[Any] = []

        def extend() -> None:
            if len(row) >= least:
                lists.append(literal(row))
            if len(lists) > MOST_LISTS:
                raise Unsupported(f"uniqueItems with more than {MOST_LISTS} lists")
            if most is None or len(row) < most:
                for own in kinds[len(row)] if len(row) < len(kinds) else others:
                    if canonical(own) not in map(canonical, row):
                        row.append(own)
                        extend()
                        row.pop()

        extend()
        return either(lists)

    def values(self, schema: Any, followed: tuple[str, ...]) -> list[Any]:
        """The values of a part that has few.

        Raises:
          Unsupported: if it has more, or does not list them.
        """
        flat, _ = self.flat(schema, followed)
        if flat is None:
            return []
        if "enum" in flat or "const" in flat:
            values = flat["enum"] if "enum" in flat else [flat["const"]]
        elif flat.get("type") in ("boolean", "null", ["boolean"], ["null"]):
            values = [True, False] if "boolean" in flat["type"] else [None]
        else:
            raise Unsupported("uniqueItems of items that are not listed; enum, const, boolean and null are")
        found = [own for own in values if self.value(both(flat, {"enum": [own]}), followed) is not None]
        return list({canonical(own): own for own in found}.values())

    def string(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        least, most = _counts(schema, "minLength", "maxLength")
        form = schema["format"] if schema.get("format") in FORMATS else None
        forbidden = [own for own in _forbidden(schema) if isinstance(own, str)]
        if "pattern" in schema and form is not None:
            raise Unsupported("pattern beside format")
        if most is not None and least > most:
            return None
        if "pattern" in schema or form is not None:
            if forbidden:
                raise Unsupported(f"not of values beside {'pattern' if form is None else 'format'}")
            own = in_string(schema["pattern"], least, most) if form is None else _of_format(form, least, most)
            return None if own is None else f'"(?:{own})"'
        forbidden = [own for own in forbidden if least <= len(own) and (most is None or len(own) <= most)]
        if forbidden:
            if least or most is not None:
                raise Unsupported("not of values beside minLength or maxLength")
            return f'"{differing(forbidden)}"'
        if not least and most is None:
            return STRING
        return f'"{PLAIN}{{{least},{"" if most is None else most}}}"'

    def integer(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        if FRACTIONAL in schema:
            return None
        low, high, above, below = _bounds(schema)
        low = low if low is None else math.floor(low) + 1 if above else math.ceil(low)
        high = high if high is None else math.ceil(high) - 1 if below else math.floor(high)
        forbidden = [own for own in _forbidden(schema) if is_of(own, "integer")]
        step = schema.get("multipleOf", 1)
        if step != 1:
            if forbidden or step <= 0 or not is_of(step, "integer"):
                why = " beside not" if forbidden else "; integers above 0 are supported"
                raise Unsupported(f"multipleOf {step!r:.20}{why}")
            return multiples(int(step), low, high)
        if low is None and high is None and not forbidden:
            return INTEGER
        cuts = sorted({int(own) for own in forbidden})
        ranges = zip([low, *(cut + 1 for cut in cuts)], [*(cut - 1 for cut in cuts), high], strict=True)
        lower = lambda one: low if one is None else one if low is None else max(low, one)
        upper = lambda one: high if one is None else one if high is None else min(high, one)
        return either(integers(lower(one), upper(two)) for one, two in ranges)

    def number(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        low, high, above, below = _bounds(schema)
        forbidden = [own for own in _forbidden(schema) if is_of(own, "number")]
        if FRACTIONAL in schema:
            if low is not None or high is not None or forbidden or "multipleOf" in schema:
                raise Unsupported("not of integers beside other keywords of numbers")
            return f"-?(?:0|[1-9][0-9]{{0,7}}){fraction(8)}"
        if forbidden or "multipleOf" in schema:
            return self.integer(schema, followed)
        if low is None and high is None:
            return NUMBER
        if wrong := [one for one in (low, high) if one is not None and one != int(one)]:
            raise Unsupported(f"minimum or maximum {wrong[0]} of numbers; whole ones are supported")
        whole = lambda bound: None if bound is None else int(bound)
        return numbers(whole(low), whole(high), above, below)

    def boolean(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        return either(literal(own) for own in (True, False) if self._may(schema, own))

    def null(self, schema: Mapping[str, Any], followed: tuple[str, ...]) -> str | None:
        return "null" if self._may(schema, None) else None

    def _may(self, schema: Mapping[str, Any], value: Any) -> bool:
        return canonical(value) not in map(canonical, _forbidden(schema))


_JOINED = ("$ref", "allOf", "if", "not", "dependentRequired", "dependentSchemas", "dependencies")


def _forbidden(schema: Mapping[str, Any]) -> list[Any]:
    """The values that `not` lists."""
    return schema.get("not", {}).get("enum", [])


def anything() -> str:
    """A value of any type, whose parts are plain."""
    plain = f"(?:{STRING}|{NUMBER}|true|false|null)"
    members = sequence([], f"{STRING}:{SPACE}{plain}", 0, None)
    return f"(?:{plain}|{array([], plain, 0, None)}|\\{{{members}\\}})"


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


def _of_format(form: str, least: int, most: int | None) -> str | None:
    """The expression of a format whose texts have all the length that is asked for."""
    low, high = widths(FORMATS[form])
    if most is not None and low > most or high is not None and high < least:
        return None
    if low < least or most is not None and (high is None or high > most):
        raise Unsupported(f"format {form!r} beside minLength or maxLength that some of its texts break")
    return FORMATS[form]


def _counts(schema: Mapping[str, Any], low: str, high: str) -> tuple[int, int | None]:
    return int(schema.get(low, 0)), int(schema[high]) if high in schema else None


def _bounds(schema: Mapping[str, Any]) -> tuple[float | None, float | None, bool, bool]:
    """The bounds of a number, and whether they are left out."""

    def tightest(kept: str, left_out: str, sign: int) -> tuple[float | None, bool]:
        found = [(sign * schema[word], strict) for word, strict in ((kept, False), (left_out, True)) if word in schema]
        return (None, False) if not found else (sign * max(found)[0], max(found)[1])

    low, above = tightest("minimum", "exclusiveMinimum", 1)
    high, below = tightest("maximum", "exclusiveMaximum", -1)
    for word, bound, sign in (("minimum", low, 1), ("maximum", high, -1)):
        if bound is not None and sign * bound > LARGEST:
            raise Unsupported(f"{word} {bound:.3g}; bounds up to {LARGEST:.0e} are supported")
    if low is not None and low < -LARGEST:
        low, above = -LARGEST, False
    if high is not None and high > LARGEST:
        high, below = LARGEST, False
    return low, high, above, below
