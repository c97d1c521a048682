"""What a user writes for a constraint, and the table that it becomes."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.constrain.context_free import bounded
from specjax.constrain.grammar import Grammar, opened, read_by_guidance
from specjax.constrain.kinds import KINDS
from specjax.constrain.regular import automaton, escaped
from specjax.constrain.schema import expression
from specjax.constrain.table import Table, shown
from specjax.constrain.tokens import table_of
from specjax.constrain.vocabulary import Vocabulary


def read(value: Any) -> Any:
    """The canonical form of what a user gives: a line, or what was compiled as it is; the empty line is no constraint.

    Args:
      value: a line such as `"choice:yes|no"`; an object with one entry, such as `{"choice": ["yes", "no"]}`, whose value
        is a schema, an expression, a list of texts or a grammar; or a table or grammar that `compiled` has made.

    Raises:
      ValueError, TypeError: for anything else.

    >>> read({"json": {"type": "integer"}})
    'json:{"type": "integer"}'
    """
    if isinstance(value, Table | Grammar):
        return value
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, own),) = value.items()
        if kind not in KINDS or not isinstance(own, KINDS[kind].values):
            raise TypeError("not such an object")
        return f"{kind}:{own if isinstance(own, str) else json.dumps(own, ensure_ascii=False)}"
    if value is None or isinstance(value, (str, tuple, list)) and not value:
        return ""
    if not isinstance(value, str):
        raise TypeError("not a line")
    kind, found, own = value.partition(":")
    if kind not in KINDS or not found or not own:
        raise ValueError("no such line")
    return value


def named_file(value: Any) -> Path | None:
    """The file that a line of a constraint names; None if there is none."""
    kind, _, own = value.partition(":") if isinstance(value, str) else ("", "", "")
    named = kind in ("json", "grammar", "nested") and not _is_text(own) and own.strip() not in ("true", "false")
    return Path(own) if named and Path(own).is_file() else None


def compiled(value: Any, vocabulary: Vocabulary, room: int | None = None) -> Table | Grammar:
    """The table of a constraint for a model's tokens, or its grammar. Equal constraints are compiled once.

    Args:
      value: see `read`.
      vocabulary: the model's.
      room: the most tokens of a text; None: not known.

    Raises:
      ValueError: one line that says what cannot be followed.
    """
    line = read(value)
    vocabulary.check()
    kind, _, own = line.partition(":") if isinstance(line, str) else ("", "", "")
    if isinstance(line, Grammar) or kind == "grammar" and not vocabulary.gaps:
        return _grammar(line, vocabulary)
    if kind in ("grammar", "nested"):
        table = _nested(line, _text(own, "grammar"), vocabulary)
    else:
        table = line if isinstance(line, Table) else _compiled(line, _pattern(line), vocabulary)
    if len(table.classes) != vocabulary.size:
        raise ValueError(
            f"{shown(table.line)}: its table is of {len(table.classes)} tokens, and {vocabulary.name} has {vocabulary.size}"
        )
    if room is not None and table.distance[0] > room:
        raise ValueError(
            f"{shown(table.line)}: its shortest text has {table.distance[0]} tokens, and the limit is {room}: raise "
            "max_new_tokens"
        )
    return table


@functools.lru_cache(maxsize=64)
def _compiled(line: str, pattern: str, vocabulary: Vocabulary) -> Table:
    return table_of(automaton(pattern, line), vocabulary, line)


@functools.lru_cache(maxsize=64)
def _nested(line: str, text: str, vocabulary: Vocabulary) -> Table:
    """The table of a grammar: a canvas has gaps, which a matcher that goes from left to right cannot follow."""
    if text.lstrip()[:1] == "{":
        raise ValueError(f"{shown(line)}: it is a JSON Schema, which json:... follows by a table")
    read_by_guidance(line, text, vocabulary)
    return table_of(bounded(text, line), vocabulary, line)


def _grammar(given: Any, vocabulary: Vocabulary) -> Grammar:
    line = given if isinstance(given, str) else given.line
    if vocabulary.meshed:
        raise ValueError(
            f"{shown(line)}: a grammar is followed on the host of one device: give nested:..., or leave the mesh out"
        )
    own = given if isinstance(given, Grammar) else _opened(line, _text(line.partition(":")[2], "grammar"), vocabulary)
    if own.vocabulary != vocabulary:
        raise ValueError(f"{shown(line)}: it was made for another model's tokens: give its line")
    return own


_opened = functools.lru_cache(maxsize=64)(opened)


def _is_text(own: str) -> bool:
    """Whether it is a schema, a grammar's first rule or several lines, and not the name of a file."""
    return "\n" in own or own.lstrip().startswith(("{", "start:"))


def _text(own: str, what: str) -> str:
    """A schema or a grammar, as it is or from a file."""
    if _is_text(own):
        return own
    try:
        return Path(own).read_text()
    except OSError as error:
        raise ValueError(f"the {what} {own} cannot be read ({error.strerror})") from error


def _pattern(line: str) -> str:
    """The regular expression of a line."""
    kind, _, own = line.partition(":")
    if kind == "regex":
        return own
    if kind == "choice":
        texts = _texts(own)
        if not all(texts):
            raise ValueError(f"{shown(line)}: a choice is empty: leave it out")
        return "|".join(map(escaped, texts))
    try:
        return expression(_schema(own))
    except ValueError as error:
        raise ValueError(f"{shown(line)}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{shown(line)}: the schema nests too much") from error


def _texts(own: str) -> list[str]:
    """The texts of a choice: with `|` between them, or as a list in JSON."""
    if own.startswith("["):
        try:
            found = json.loads(own)
        except ValueError:
            return own.split("|")
        if found and isinstance(found, list) and all(isinstance(text, str) for text in found):
            return found
    return own.split("|")


def _schema(own: str) -> Any:
    """A schema from its text, or from a file."""
    text = own.strip()
    if text not in ("true", "false"):
        text = _text(own, "schema")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error
