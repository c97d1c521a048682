"""The grammar of a line of text that chooses methods; it does not know the methods.

`NAME:FIELD=VALUE,...` is a method and its settings, `a+b` several in a row. The fields of a part (a drafter's expander,
its rule) stand among the method's own. In a comma list of lines, an item with a `=` and no name in front belongs to the
line before it. `OPTION=VALUE;OPTION=VALUE` sets options of a command, whose values may be such lines.

A value in quotes, `FIELD="VALUE"` or `FIELD='VALUE'`, is taken literally. A line in parentheses,
`FIELD=(NAME:FIELD=VALUE,...)`, is also taken as a whole, and so is the path of an existing file or folder without
quotes; of several such paths the longest counts.

A JSON object is equivalent to a line: `{"name": NAME, FIELD: VALUE, ...}`, where a value may be such an object; a list
of objects is `a+b`.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Line:
    """A method and its settings.

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
    >>> read_line("none"), read_line("none,length=1")
    (Line(name='none', fields={}), Line(name='none', fields={'length': '1'}))
    >>> read_line('draft:model="runs/a+b, c",k=2').fields
    {'model': 'runs/a+b, c', 'k': '2'}
    >>> read_line("eagle3:verifier=(typical:epsilon=0.3,delta=0.1),taps=1 2").fields
    {'verifier': 'typical:epsilon=0.3,delta=0.1', 'taps': '1 2'}

    Raises:
      ValueError: if a field has no value, or a quote or parenthesis is not closed.
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
    """A field's value as written in a line, in quotes if it would end early without them.

    >>> spelt((1, 15, 28)), spelt(True), spelt("runs/a+b")
    ('1 15 28', 'true', '"runs/a+b"')

    Raises:
      ValueError: for a text that needs quotes and contains both kinds.
    """
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    if text == text.strip() and text[:1] not in _QUOTES and not any(mark in text for mark in (*_ENDS, "(", ")")):
        return text
    for quote in _QUOTES:
        if quote not in text:
            return f"{quote}{text}{quote}"
    raise ValueError(f"{text!r} cannot stand in a line: it has quotes of both kinds")


def of_json(text: str) -> str:
    """The line that is equivalent to a JSON object or a list of them; other text unchanged.

    >>> of_json('{"name": "draft", "model": "runs/a+b", "verifier": {"name": "typical", "epsilon": 0.3}}')
    'draft:model="runs/a+b",verifier=(typical:epsilon=0.3)'
    >>> of_json('[{"name": "credit"}, {"name": "threshold"}]')
    'credit+threshold'

    Raises:
      ValueError: for JSON that is not such an object.
    """
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r:.60} begins as JSON, but is not valid JSON: {error}") from error
    return line_of(content)


def line_of(content: Any) -> str:
    """The line for a JSON object, or for a list of them; see `of_json`."""
    if isinstance(content, list) and content:
        return "+".join(map(line_of, content))
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        raise ValueError(
            f'a method in JSON is an object with a "name", as {{"name": "prompt_lookup", "length": 8}}: {content!r:.40}'
        )
    fields = [f"{name}={_json_value(value)}" for name, value in content.items() if name != "name"]
    return content["name"] + (":" + ",".join(fields) if fields else "")


def _json_value(value: Any) -> str:
    if isinstance(value, dict) or isinstance(value, list) and value and isinstance(value[0], dict):
        return f"({line_of(value)})"
    return spelt(tuple(value) if isinstance(value, list) else value)


def parts(text: str) -> list[str]:
    """The lines of methods in a row.

    >>> parts("credit:alpha=1+threshold")
    ['credit:alpha=1', 'threshold']
    """
    return _split(text, "+")


def lines(texts: Iterable[str]) -> list[str]:
    """Every line of some comma lists, without repetitions.

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
    """All values of a line's fields, including the folders that it names; text that is not a line has none.

    >>> values("prompt_lookup:length=3+draft:model=my/draft,expander=top_k")
    ['3', 'my/draft', 'top_k']
    >>> values("none:verifier=(judge:model=my/head)"), values("none:verifier=judge:model=my/head")
    (['my/head'], ['judge:model=my/head', 'my/head'])
    >>> values('{"name": "draft", "model": "my/draft"}')
    ['my/draft']
    """
    return _values(of_json(text))


def _values(text: str) -> list[str]:
    found: list[str] = []
    for item in (item for part in parts(text) for item in _items(part)[1] if "=" in item):
        mark, value = item.partition("=")[2].strip()[:1], _field(item)[1]
        found += [] if mark == "(" else [value]
        found += [] if mark in _QUOTES else _values(value)
    return found


def settings(text: str) -> dict[str, str]:
    """Options of a command and their values, as they were written.

    >>> settings("decode=threshold:threshold=0.9,cache=prefix; temperature=0.7")
    {'decode': 'threshold:threshold=0.9,cache=prefix', 'temperature': '0.7'}

    Raises:
      ValueError: if an item is not `OPTION=VALUE`, or there is none.
    """
    items = [item.strip() for item in _split(text, ";") if item.strip()]
    wrong = [item for item in items if "=" not in item]
    if wrong or not items:
        raise ValueError(f"{(wrong or [text])[0]!r} is not OPTION=VALUE; several are separated by semicolons")
    return dict(_field(item) for item in items)


def _items(text: str) -> tuple[str, list[str]]:
    name = re.split(r"[:,]", text.strip(), maxsplit=1)[0]
    rest = text.strip()[len(name) + 1 :]
    return name.strip(), [item.strip() for item in _split(rest, ",") if item.strip()]


def _field(item: str) -> tuple[str, str]:
    field, _, value = item.partition("=")
    value = value.strip()
    whole = value[:1] in _QUOTES or value[:1] == "("
    return field.strip(), value[1:-1] if whole else value


_QUOTES = ('"', "'")
_ENDS = (",", "+", ";")
"""The marks that end a value, each in its place."""


def _split(text: str, mark: str) -> list[str]:
    """The text between the marks, except marks within a value that is taken as a whole."""
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
    """Where the value that begins here ends, if it is taken as a whole; for another value, where it begins."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    ends = [found.start() for found in re.finditer(r"[,+;]|\Z", text) if found.start() > begin]
    if (mark := text[begin : begin + 1]) in (*_QUOTES, "("):
        close = _closing(text, begin) if mark == "(" else text.find(mark, begin + 1)
        called = "parenthesis" if mark == "(" else "quote"
        if close < 0:
            raise ValueError(f"{text!r}: the {called} before {text[begin + 1 :]!r} has no end")
        if (rest := text[close + 1 :].lstrip()) and rest[0] not in _ENDS:
            raise ValueError(
                f"{text!r}: {rest!r} follows the {called}'s end, where a comma, plus or semicolon must stand"
            )
        return close + 1
    return next((end for end in reversed(ends) if os.path.exists(text[begin:end].rstrip())), start)


def _closing(text: str, begin: int) -> int:
    """Where the parenthesis that opens at `begin` is closed, ignoring quoted text; -1: nowhere."""
    depth, at = 0, begin
    while at < len(text):
        mark = text[at]
        if mark in _QUOTES and text[at - 1] == "=":
            at = text.find(mark, at + 1)
            if at < 0:
                return -1
        depth += (mark == "(") - (mark == ")")
        if not depth:
            return at
        at += 1
    return -1
