"""JSON Schema's keyword `pattern`: an expression over a string's characters as one over the text of the JSON string.

JSON Schema asks for the syntax of ECMA-262, and validators in Python use Python's. Where these differ, only what both allow is
written: `\\d` is a digit of ASCII, and what is no digit is another sign of ASCII.
"""

import dataclasses
import itertools
import re
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from specjax.constrain.regular import escaped

ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
"""Characters that a JSON string writes otherwise."""
PLAIN = r'[^"\\\x00-\x1f]'
CHARACTER = rf'(?:{PLAIN}|\\["\\/bfnrt])'
"""One character of a JSON string, as it is written."""
_IN = {
    sre.CATEGORY_DIGIT: "0-9", sre.CATEGORY_WORD: "0-9A-Za-z_", sre.CATEGORY_SPACE: r"\x20\t\n\r\f",
    sre.CATEGORY_NOT_DIGIT: "[\\x20-\\x7e&&[^0-9]]", sre.CATEGORY_NOT_WORD: "[\\x20-\\x7e&&[^0-9A-Za-z_]]",
    sre.CATEGORY_NOT_SPACE: "[\\x21-\\x7e]",
}  # fmt: skip
"""What a class holds at least."""
_OUT = {
    sre.CATEGORY_DIGIT: r"\p{Nd}", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_SPACE: r"\s\x1c-\x1f",
    sre.CATEGORY_NOT_DIGIT: "[^0-9]", sre.CATEGORY_NOT_WORD: "[^0-9A-Za-z_]", sre.CATEGORY_NOT_SPACE: r"[^\x20\t\n\r\f]",
}  # fmt: skip
"""What a class holds at most, for classes of all other signs."""


_ENDLESS = 1 << 30
"""A width that counts as no limit."""


def in_string(pattern: str, least: int = 0, most: int | None = None) -> str | None:
    """The expression for what stands between a JSON string's quotes, if its characters match a pattern somewhere.

    Args:
      pattern: in the syntax of ECMA-262.
      least: characters of the string.
      most: characters of the string; None for no limit.

    Returns:
      None if no string that matches has such a length.

    Raises:
      ValueError: for syntax that has no such expression, and for limits that more than one part must keep together.
    """
    parsed = _parsed(pattern)
    if parsed.state.flags & ~re.UNICODE.value:
        raise ValueError(f"pattern {pattern!r:.40} sets flags, which are not supported")
    items = list(parsed)
    branches = [items] if len(items) != 1 or items[0][0] is not sre.BRANCH else [list(one) for one in items[0][1][1]]
    found = [_anywhere(one, pattern, least, most) for one in branches]
    kept = [own for own in found if own is not None]
    return "|".join(kept) if kept else None


def widths(expression: str) -> tuple[int, int | None]:
    """The least and the most characters of an expression's matches; None for no limit."""
    low, high = _parsed(expression).getwidth()
    return low, None if high >= _ENDLESS else high


def begins(pattern: str) -> str:
    """The text with which every match begins at a string's start, if a pattern says so plainly."""
    items = list(_parsed(pattern))
    if items[:1] != [(sre.AT, sre.AT_BEGINNING)]:
        return ""
    signs = itertools.takewhile(lambda item: item[0] is sre.LITERAL, items[1:])
    return "".join(chr(value) for _, value in signs)


def _parsed(pattern: str) -> Any:
    try:
        return parser.parse(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r:.40} is no expression: {error}") from error


def _anywhere(items: list[Any], pattern: str, least: int, most: int | None) -> str | None:
    """A branch of a pattern, which may stand anywhere unless it says where."""
    begins = items[:1] in ([(sre.AT, sre.AT_BEGINNING)], [(sre.AT, sre.AT_BEGINNING_STRING)])
    ends = items[-1:] in ([(sre.AT, sre.AT_END)], [(sre.AT, sre.AT_END_STRING)])
    own = [_part(kind, value, pattern) for kind, value in items[begins : len(items) - ends]]
    other = _Part(CHARACTER, 0, None, repeated=True)
    return _of_length([*([] if begins else [other]), *own, *([] if ends else [other])], pattern, least, most)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a pattern: what it repeats for `low` to `high` characters (None: any number), or its whole expression."""

    expression: str
    low: int
    high: int | None
    repeated: bool = False

    def written(self) -> str:
        return (
            f"{self.expression}{{{self.low},{'' if self.high is None else self.high}}}"
            if self.repeated
            else self.expression
        )


def _part(kind: Any, value: Any, pattern: str) -> _Part:
    low, high = parser.SubPattern(parser.State(), [(kind, value)]).getwidth()
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT) and value[2].getwidth() == (1, 1):
        own = f"(?:{_written(value[2], pattern)})"
        return _Part(own, low, None if value[1] is sre.MAXREPEAT else high, repeated=True)
    return _Part(_item(kind, value, pattern), low, None if high >= _ENDLESS else high)


def _of_length(parts: list[_Part], pattern: str, least: int, most: int | None) -> str | None:
    """Parts that together have from `least` to `most` characters. At most one of them has to be kept shorter or longer."""
    low = sum(part.low for part in parts)
    high = None if any(part.high is None for part in parts) else sum(part.high or 0 for part in parts)
    if most is not None and (low > most or least > most) or high is not None and high < least:
        return None
    open = [at for at, part in enumerate(parts) if part.high != part.low]
    if low < least or most is not None and (high is None or high > most):
        if len(open) != 1 or not parts[open[0]].repeated:
            raise ValueError(
                f"the schema has an unsupported keyword: pattern {pattern!r:.40} beside minLength or maxLength"
            )
        part = parts[open[0]]
        rest = low - part.low
        above = [each for each in (part.high, None if most is None else most - rest) if each is not None]
        parts = [*parts]
        parts[open[0]] = dataclasses.replace(part, low=max(part.low, least - rest), high=min(above) if above else None)
    return "".join(part.written() for part in parts)


def _written(items: Any, pattern: str) -> str:
    return "".join(_item(kind, value, pattern) for kind, value in items)


def _item(kind: Any, value: Any, pattern: str) -> str:
    if kind is sre.LITERAL:
        return _literal(chr(value))
    if kind is sre.NOT_LITERAL:
        return _class([(sre.NEGATE, None), (sre.LITERAL, value)])
    if kind is sre.ANY:
        return r'(?:[^"\\\x00-\x1f\x{2028}\x{2029}]|\\["\\bft])'
    if kind is sre.IN:
        return _class(value)
    if kind is sre.BRANCH:
        return f"(?:{'|'.join(_written(one, pattern) for one in value[1])})"
    if kind is sre.SUBPATTERN and not value[1] and not value[2]:
        return f"(?:{_written(value[3], pattern)})"
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, own = value
        return f"(?:{_written(own, pattern)}){{{least},{'' if most is sre.MAXREPEAT else most}}}"
    raise ValueError(f"pattern {pattern!r:.40} has {str(kind).lower()}, which is not supported")


def _literal(sign: str) -> str:
    if sign < " " and sign not in ESCAPES:
        raise ValueError(f"a pattern with the control character {sign!r} is not supported")
    return escaped(ESCAPES.get(sign, sign))


def _class(items: list[Any]) -> str:
    """A class of characters as a class of those that stand for themselves, and the escapes of others."""
    negated = items[0][0] is sre.NEGATE
    table = _OUT if negated else _IN
    inside = "".join(_member(kind, value, table) for kind, value in items[negated:])
    raw = f"[{'^' if negated else ''}{inside}]"
    found = [escaped(written) for sign, written in ESCAPES.items() if _holds(items, sign)]
    return f"(?:{'|'.join([f'[{raw}&&{PLAIN}]', *found])})"


def _member(kind: Any, value: Any, table: Any) -> str:
    if kind is sre.LITERAL:
        return f"\\x{{{value:x}}}"
    if kind is sre.RANGE:
        return f"\\x{{{value[0]:x}}}-\\x{{{value[1]:x}}}"
    return table[value]


def _holds(items: list[Any], sign: str) -> bool:
    """Whether a class holds a sign of ASCII."""
    digit, word, space = sign.isdigit(), sign.isalnum() or sign == "_", sign.isspace()
    kinds = {sre.CATEGORY_DIGIT: digit, sre.CATEGORY_WORD: word, sre.CATEGORY_SPACE: space}
    kinds |= {sre.CATEGORY_NOT_DIGIT: not digit, sre.CATEGORY_NOT_WORD: not word, sre.CATEGORY_NOT_SPACE: not space}
    found = False
    for kind, value in items:
        if kind is sre.LITERAL:
            found |= value == ord(sign)
        elif kind is sre.RANGE:
            found |= value[0] <= ord(sign) <= value[1]
        elif kind is sre.CATEGORY:
            found |= kinds[value]
    return found != (items[0][0] is sre.NEGATE)
