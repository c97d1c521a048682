"""The grammar of a line of text that chooses methods; it knows none of them.

`NAME:FIELD=VALUE,...` is a method and its settings, `a+b` several in a row. The fields of a part (a drafter's expander, its
rule) stand flat among the method's own. In a comma list of lines, an item with a `=` and no name in front belongs to the line
before it. `OPTION=VALUE;OPTION=VALUE` sets options of a command, whose values may be such lines.

A value in quotes, `FIELD="VALUE"` or `FIELD='VALUE'`, is taken as it stands between them. So is the path of a file or folder
that exists, without quotes: of several such paths the longest.
"""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Line:
    """A method and what was set.

    Attributes:
      name: of the method.
      fields: values by field, as they were written.
    """

    name: str
    fields: dict[str, str]


def read_line(text: str, kind: str = "line") -> Line:
    """One method's line; `kind` is for errors.

    >>> read_line("prompt_lookup: length=8, ngram=3")
    Line(name='prompt_lookup', fields={'length': '8', 'ngram': '3'})
    >>> read_line("none")
    Line(name='none', fields={})
    >>> read_line('draft:model="runs/a+b, c",k=2').fields
    {'model': 'runs/a+b, c', 'k': '2'}

    Raises:
      ValueError: where a field has no value, or a quote no end.
    """
    name, items = _items(text)
    for item in items:
        if "=" not in item:
            raise ValueError(f"{kind} {text!r}: {item!r} is not FIELD=VALUE")
    return Line(name, dict(_field(item) for item in items))


def extended(text: str, settings: str) -> str:
    """A line with more settings at its end.

    >>> extended("draft", "length=8"), extended("draft:model=my/draft", "length=8")
    ('draft:length=8', 'draft:model=my/draft,length=8')
    """
    return f"{text}{',' if ':' in text else ':'}{settings}"


def spelt(value: Any) -> str:
    """A field's value as a line has it, in quotes where it would end early without them.

    >>> spelt((1, 15, 28)), spelt(0.3), spelt("runs/a+b")
    ('1 15 28', '0.3', '"runs/a+b"')

    Raises:
      ValueError: on a text that needs quotes and has both kinds.
    """
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if text == text.strip() and text[:1] not in _QUOTES and not any(mark in text for mark in _ENDS):
        return text
    for quote in _QUOTES:
        if quote not in text:
            return f"{quote}{text}{quote}"
    raise ValueError(f"{text!r} cannot stand in a line: it has quotes of both kinds")


def parts(text: str) -> list[str]:
    """The lines of methods in a row.

    >>> parts("credit:alpha=1+threshold")
    ['credit:alpha=1', 'threshold']
    """
    return _split(text, "+")


def lines(texts: Iterable[str]) -> list[str]:
    """Every line of some comma lists, once.

    >>> lines(["credit:alpha=1,beta=1+threshold:threshold=0.8,fixed"])
    ['credit:alpha=1,beta=1+threshold:threshold=0.8', 'fixed']
    >>> lines(["prompt_lookup:length=8,ngram=3,none", "draft"])
    ['prompt_lookup:length=8,ngram=3', 'none', 'draft']
    """
    found: list[str] = []
    for text in texts:
        first, *others = _split(text, ",")
        found.append(first.strip())
        for item in others:
            if "=" in item and ":" not in item.partition("=")[0]:
                found[-1] += "," + item
            else:
                found.append(item.strip())
    return list(dict.fromkeys(found))


def values(text: str) -> list[str]:
    """Everything that a line sets a field to, the folders that it names among them; words that are no line have none.

    >>> values("prompt_lookup:length=3+draft:model=my/draft,expander=top_k")
    ['3', 'my/draft', 'top_k']
    """
    items = [item for part in parts(text) for item in _items(part)[1]]
    return [_field(item)[1] for item in items if "=" in item]


def settings(text: str) -> dict[str, str]:
    """Options of a command and their values, as they were written.

    >>> settings("unmask=threshold:threshold=0.9; cache=prefix")
    {'unmask': 'threshold:threshold=0.9', 'cache': 'prefix'}

    Raises:
      ValueError: where an item is no `OPTION=VALUE`, or there is none.
    """
    items = [item.strip() for item in _split(text, ";") if item.strip()]
    wrong = [item for item in items if "=" not in item]
    if wrong or not items:
        raise ValueError(f"{(wrong or [text])[0]!r} is not OPTION=VALUE; several are separated by semicolons")
    return dict(_field(item) for item in items)


def _items(text: str) -> tuple[str, list[str]]:
    name, _, rest = text.strip().partition(":")
    return name.strip(), [item.strip() for item in _split(rest, ",") if item.strip()]


def _field(item: str) -> tuple[str, str]:
    field, _, value = item.partition("=")
    value = value.strip()
    return field.strip(), value[1:-1] if value[:1] in _QUOTES else value


_QUOTES = ('"', "'")
_ENDS = (",", "+", ";")
"""What ends a value, each in its place."""


def _split(text: str, mark: str) -> list[str]:
    """The text between the marks that stand in no value which is taken as a whole."""
    found, start, at = [], 0, 0
    while at < len(text):
        if text[at] == mark:
            found.append(text[start:at])
            start = at = at + 1
        elif text[at] == "=":
            at = _end_of_value(text, at + 1)
        else:
            at += 1
    return [*found, text[start:]]


def _end_of_value(text: str, start: int) -> int:
    """Where a value ends that is taken as a whole; where it begins, of another."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    ends = [found.start() for found in re.finditer(r"[,+;]|\Z", text) if found.start() > begin]
    if text[begin : begin + 1] in _QUOTES:
        close = text.find(text[begin], begin + 1)
        if close < 0:
            raise ValueError(f"{text!r}: the quote before {text[begin + 1 :]!r} has no end")
        if (rest := text[close + 1 :].lstrip()) and rest[0] not in _ENDS:
            raise ValueError(f"{text!r}: {rest!r} follows a quote's end: a comma, plus or semicolon does")
        return close + 1
    return next((end for end in reversed(ends) if os.path.exists(text[begin:end].rstrip())), start)
