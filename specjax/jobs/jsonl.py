"""Prompts and records as JSON lines. A bad line becomes a record with its error; other lines are not affected."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specjax.decode import Decode
from specjax.decode.lines import decode_of
from specjax.serve.call import joined
from specjax.serve.engine import Engine
from specjax.serve.fields import under_own_names
from specjax.serve.request import Record, Request
from specjax.serve.sampling import OPTIONS

DEEPEST = 64
"""The most levels of nesting in a line."""
_NAMES = {int: "an integer", float: "a number"}
_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
WAYS = ("decode", "drafter")
"""Fields that name a way to decode, like the job's options."""
FIELDS = ("prompt", "messages", "id", "suffix", "stop", "domain", *WAYS)
"""The fields of a line besides generation options."""


class LineError(ValueError):
    """A line of an input file that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of an input file.

    Attributes:
      number: from 1.
      prompt: text, token ids or chat messages; None if there is none to show.
      id: the caller's name for it, or None.
      options: the generation options that it sets, and `stop`.
      suffix: the text after the new text: a string or token ids, or None.
      unknown: fields without a meaning here.
      error: its error, or None.
      decode: the line of a way to decode, which must be the job's; None: it names none.
      drafter: the line of a drafter, likewise.
      where: of an input in several files, the file and the line in it, for errors.
      domain: see `Request`.
    """

    number: int
    prompt: Any = None
    id: str | int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    error: str | None = None
    suffix: Any = None
    decode: str | None = None
    drafter: str | None = None
    where: str = ""
    domain: str | None = None


Form = Callable[[int, dict[str, Any]], Line]
"""A function from a line's number and object to a `Line`."""


def read(path: str | os.PathLike[str], form: Form | None = None) -> Iterator[Line]:
    """Yields the lines of a file, good and bad; blank lines are skipped.

    Args:
      path: the file.
      form: makes a line from an object; None: `from_object`.

    Raises:
      ValueError: if the file is missing or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield from parse_all(file, form)
    except OSError as error:
        raise ValueError(f"cannot read the input file {str(path)!r}: {error.strerror or error}") from error


def parse_all(file: Iterable[bytes], form: Form | None = None) -> Iterator[Line]:
    """Yields the lines of a file's content, good and bad; blank lines are skipped. See `read`."""
    for number, line in enumerate(file, start=1):
        own = line.removesuffix(b"\n")
        own = own.removeprefix(b"\xef\xbb\xbf") if number == 1 else own
        if own.strip():
            yield parse(number, own, form)


def loads(text: str | bytes) -> Any:
    """A value from JSON.

    Raises:
      ValueError: if it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply ({error})") from error


def parse(number: int, line: bytes, form: Form | None = None) -> Line:
    """One line of JSON; see `read`."""
    try:
        content = loads(line.decode())
    except UnicodeDecodeError as error:
        return Line(number, error=f"not valid UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return Line(number, error=f"not valid JSON: {error}")
    if not isinstance(content, dict):
        return Line(number, error=f"not a JSON object but {_kind(content)}")
    return (form or from_object)(number, content)


def from_object(number: int, content: dict[str, Any]) -> Line:
    """A line from an object with `prompt` or `messages`, and optionally `id`, `suffix`, `stop` and generation options.

    Options may have the names of other systems (`specjax.serve.fields`)."""
    if deeper(content):
        return Line(number, error=f"nested more than {DEEPEST} levels deep")
    prompt, name = shown(content)
    unknown: tuple[str, ...] = ()
    try:
        content = under_own_names(content)
        unknown = tuple(key for key in content if key not in (*FIELDS, *OPTIONS))
        _check(content)
        options = {key: _option(key, content[key]) for key in OPTIONS if content.get(key) is not None}
    except ValueError as error:
        return Line(number, prompt, name, unknown=unknown, error=str(error))
    if content.get("stop") is not None:
        options["stop"] = content["stop"]
    said = {key: content[key] for key in WAYS if content.get(key) is not None}
    ways = {key: way if isinstance(way, str) else json.dumps(way) for key, way in said.items()}
    return Line(
        number, prompt, name, options, unknown, suffix=content.get("suffix"), domain=content.get("domain"), **ways
    )


def _check(content: dict[str, Any]) -> None:
    if "custom_id" in content and "body" in content:
        raise LineError("it is a request of the OpenAI batch API: give --format openai")
    key, prompt = check_prompt(content)
    if not prompt:
        raise LineError(f"the {'prompt is' if key == 'prompt' else 'messages are'} empty")
    suffix = content.get("suffix")
    ids = suffix if isinstance(suffix, list) else []
    if (
        not isinstance(suffix, (str, list, type(None)))
        or not all(type(item) is int for item in ids)
        or suffix in ("", [])
    ):
        raise LineError(f"suffix must be a string or a list of token ids, and not empty, got {_kind(suffix)}")
    check_name(content)
    domain = content.get("domain")
    if domain is not None and not (isinstance(domain, str) and _DOMAIN.fullmatch(domain)):
        raise LineError(f"domain must be a word of letters, digits, - and _, got {domain!r:.60}")


def check_prompt(content: dict[str, Any]) -> tuple[str, Any]:
    """The field that holds the prompt, and its value, which may be empty.

    Raises:
      LineError: if there are none or two, or if it has another type.
    """
    given = [key for key in ("prompt", "messages") if content.get(key) is not None]
    if len(given) != 1:
        raise LineError("it needs one of prompt and messages, " + ("and has both" if given else "and has neither"))
    key, prompt = given[0], content[given[0]]
    if key == "prompt":
        check_tokens(key, prompt)
    elif not isinstance(prompt, list) or not all(isinstance(item, dict) for item in prompt):
        raise LineError(f"messages must be a list of objects, got {_kind(prompt)}")
    return key, prompt


def check_tokens(key: str, value: Any) -> None:
    """Raises LineError if a field is neither a string nor a list of token ids."""
    ids = value if isinstance(value, list) else []
    if not isinstance(value, (str, list)) or not all(type(item) is int for item in ids):
        raise LineError(f"{key} must be a string or a list of token ids, got {_kind(value)}")


def check_name(content: dict[str, Any]) -> None:
    """Raises LineError if the field `id` cannot name a line."""
    name = content.get("id")
    if isinstance(name, bool) or not isinstance(name, (str, int, type(None))):
        raise LineError(f"id must be a string or an integer, got {_kind(name)}")
    if isinstance(name, str) and not _unicode(name):
        raise LineError("id is not valid Unicode")


def shown(content: dict[str, Any]) -> tuple[Any, str | int | None]:
    """Prompt and id as records show them; None for values of other types."""
    prompt, name = content.get("prompt"), content.get("id")
    prompt = content.get("messages") if prompt is None else prompt
    named = isinstance(name, (str, int)) and not isinstance(name, bool)
    return prompt if isinstance(prompt, (str, list)) else None, name if named else None


def deeper(value: Any, levels: int = DEEPEST) -> bool:
    """Whether objects and lists are nested deeper than `levels`."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def _unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in text)


def _option(key: str, value: Any) -> Any:
    kind = OPTIONS[key]
    if kind is bool:
        if not isinstance(value, bool):
            raise LineError(f"{key} must be true or false, got {_kind(value)}")
        return value
    if kind not in _NAMES:  # a list, which is checked when it becomes a request
        return value
    if kind is int and isinstance(value, float) and value.is_integer():  # as tables and other languages write integers
        return int(value)
    good = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not good:
        raise LineError(f"{key} must be {_NAMES[kind]}, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
        int: "a number",
        float: "a number",
    }
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        return "a list" + (f" with {names.get(next(iter(kinds)), 'a list')}" if len(kinds) == 1 else " of mixed things")
    return names.get(type(value), f"a {type(value).__name__}")  # tables hold other types too


def to_requests(lines: Iterable[Line], engine: Engine, defaults: dict[str, Any]) -> Iterator[Request | Record]:
    """A request for each good line, and a failed record for each bad one.

    Args:
      lines: from `read`.
      engine: a `specjax.serve.engine.Engine`, whose model decides which prompts fit.
      defaults: options for lines that do not set them.
    """
    for line in lines:
        if line.error is None:
            try:
                check_way(line, engine.decode)
                options = joined(defaults, line.options)
                own = {"id": line.id, "line": line.number, "domain": line.domain}
                yield engine.request(line.prompt, suffix=line.suffix, **own, **options)
                continue
            except ValueError as error:
                reason = str(error)
        else:
            reason = line.error
        yield Record.failed(line.prompt, f"{line.where}{reason}", id=line.id, line=line.number)


def check_way(line: Line, way: Decode) -> None:
    """Raises ValueError if a line asks for another way to decode than the job's."""
    asked = decode_of(line.decode, line.drafter)
    if asked is not None and asked != way:
        name = "drafter" if line.decode is None else "decode"
        raise ValueError(
            f"it asks for {name} {getattr(line, name)!r}, and a job decodes all of its lines in one way: take it out, or give "
            f"--{name} for all of them"
        )


def dumps(content: Any) -> str:
    """One line of strict JSON in ASCII; numbers that JSON cannot express (NaN, infinities) become null."""
    try:
        return json.dumps(content, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
