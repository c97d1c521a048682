"""The expressions of objects and arrays from those of their parts."""

import functools
from collections.abc import Sequence

from specjax.constrain.words import Unsupported

SPACE = " ?"
MOST_COUNTED = 10
"""Properties that may be left out, if it counts how many are written."""


def sequence(parts: Sequence[tuple[str, bool]], tail: str | None, least: int, most: int | None) -> str | None:
    """The inside of an object: parts in their order with commas between them.

    Args:
      parts: the expression of each, and whether it is required.
      tail: of further parts, of which any number may follow; None for none.
      least: parts.
      most: parts; None for no limit.

    Returns:
      None if nothing is left.

    Raises:
      Unsupported: if counting takes too large an expression.
    """
    required = sum(own for _, own in parts)
    most = len(parts) if most is None and tail is None else most
    if most is not None and (least > most or required > most):
        return None
    if least > len(parts) and tail is None:
        return None
    if not parts:
        return _repeated(tail, least, most)
    if tail is None and (least > max(required, 1) or most is not None and most < len(parts)):
        if len(parts) - required > MOST_COUNTED:
            raise Unsupported(
                f"minProperties or maxProperties beside more than {MOST_COUNTED} properties that may be left out"
            )
        return _counted(tuple(parts), least, len(parts) if most is None else most)
    if tail is not None and (most is not None or least > max(required, 1)):
        raise Unsupported("minProperties or maxProperties beside properties and patternProperties")
    more = "" if tail is None else f"(?:,{SPACE}{tail})*"
    ways, ends = [], [more]
    for own, needed in reversed(parts[1:]):
        ends.append((f",{SPACE}{own}" if needed else f"(?:,{SPACE}{own})?") + ends[-1])
    for (own, needed), end in zip(parts, reversed(ends), strict=True):
        ways.append(own + end)
        if needed:
            return f"(?:{'|'.join(ways)})"
    if tail is not None:
        ways.append(tail + more)
    return f"(?:{'|'.join(ways)}){'' if least else '?'}"


def _repeated(tail: str | None, least: int, most: int | None) -> str | None:
    """Further parts alone. Two may have one name, so no more than one is sure."""
    if tail is None or most == 0:
        return None if least else ""
    if least > 1:
        raise Unsupported("minProperties above 1 without as many properties")
    own = f"{tail}(?:,{SPACE}{tail}){{0,{'' if most is None else most - 1}}}"
    return own if least else f"(?:{own})?"


def _counted(parts: tuple[tuple[str, bool], ...], least: int, most: int) -> str | None:
    """From `least` to `most` parts."""

    @functools.cache
    def after(at: int, count: int) -> str | None:
        if count > most:
            return None
        if at == len(parts):
            return "" if count >= least else None
        own, required = parts[at]
        end, without = after(at + 1, count + 1), None if required else after(at + 1, count)
        found = None if end is None else (f",{SPACE}" if count else "") + own + end
        if found is None or without is None:
            return without if found is None else found
        return f"(?:{found})?" if without == "" else f"(?:{found}|{without})"

    return after(0, 0)


def array(first: Sequence[str], rest: str | None, least: int, most: int | None) -> str | None:
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


def containing(item: str, found: str, least: int, most: int | None, count: int) -> str | None:
    """An array of items of which at least `count` are of a kind; with limits of its length, one of them is.

    Raises:
      Unsupported: for more than one beside limits.
    """
    own, more = f"(?:{found})", f"(?:{item})"
    if least <= count and most is None:
        return rf"\[(?:{more},{SPACE})*{own}(?:(?:,{SPACE}{more})*,{SPACE}{own}){{{count - 1}}}(?:,{SPACE}{more})*\]"
    if count > 1:
        raise Unsupported("minContains above 1 beside minItems or maxItems")
    ways = []
    for at in range(most if most is not None else max(least, 1)):
        end = "" if most is None else most - at - 1
        before = f"(?:{more},{SPACE}){{{at}{',' if most is None and at == max(least, 1) - 1 else ''}}}"
        ways.append(f"{before}{own}(?:,{SPACE}{more}){{{max(least - at - 1, 0)},{end}}}")
    return rf"\[(?:{'|'.join(ways)})\]" if ways else None


def counted(other: str | None, found: str | None, least: int, most: int) -> str | None:
    """An array of which from `least` to `most` items are of a kind, and all others of another."""
    more = "" if other is None else f"(?:,{SPACE}(?:{other}))*"
    ways = []
    if found is not None and most >= max(least, 1):
        before = "" if other is None else f"(?:(?:{other}),{SPACE})*"
        ways.append(f"{before}(?:{found}){more}(?:,{SPACE}(?:{found}){more}){{{max(least - 1, 0)},{most - 1}}}")
    if least == 0:
        ways.append("" if other is None else f"(?:(?:{other}){more})?")
    return rf"\[(?:{'|'.join(ways)})\]" if ways else None
