"""References within a JSON Schema, written as pointers from its root."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from urllib.parse import urldefrag, urljoin

_ONE = frozenset((
    "additionalProperties", "unevaluatedProperties", "items", "unevaluatedItems", "contains", "propertyNames", "not", "if",
    "then", "else",
))  # fmt: skip
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))


def pointed(root: Any) -> Any:
    """A schema whose references to parts with `$id` and to anchors are pointers `#/...`.

    A `$dynamicRef` becomes a reference if at most one part of the schema has its dynamic anchor, so no other can be meant.
    References that lead elsewhere stay as they are.
    """
    index = _Index({}, {})
    index.read(root, "", "")
    return index.written(root, "")


@dataclasses.dataclass
class _Index:
    """Where the parts are that have a name.

    Attributes:
      places: the pointer of each URI, with `#` and the anchor's name if it is one.
      dynamic: how many parts have a dynamic anchor of a name.
    """

    places: dict[str, str]
    dynamic: dict[str, int]

    def read(self, part: Any, base: str, at: str) -> None:
        """Enters a part and those below it; `base` is the URI that holds above it."""
        if not isinstance(part, dict):
            return
        base = _base(part, base)
        if at == "" or _base(part, ""):
            self.places.setdefault(base, at)
        for word in ("$anchor", "$dynamicAnchor", "$id"):
            name = part.get(word)
            if isinstance(name, str) and (word != "$id" or name.startswith("#")):
                self.places.setdefault(f"{base}#{name.removeprefix('#')}", at)
        if isinstance(name := part.get("$dynamicAnchor"), str):
            self.dynamic[name] = self.dynamic.get(name, 0) + 1
        for steps, own in _below(part):
            self.read(own, base, "/".join([at, *(step.replace("~", "~0").replace("/", "~1") for step in steps)]))

    def written(self, part: Any, base: str) -> Any:
        """A part with its references as pointers."""
        if not isinstance(part, dict):
            return part
        base = _base(part, base)
        found = dict(part)
        for word, own in part.items():
            if word in _ONE:
                found[word] = self.written(own, base)
            elif word in _LISTS and isinstance(own, list):
                found[word] = [self.written(each, base) for each in own]
            elif word in _MAPS and isinstance(own, dict):
                found[word] = {name: self.written(each, base) for name, each in own.items()}
        for word in ("$ref", "$dynamicRef"):
            name = part.get(word)
            to = self.pointer(name, base) if isinstance(name, str) else None
            if not isinstance(name, str) or to is None:
                continue
            if word == "$dynamicRef" and ("$ref" in part or self.dynamic.get(name.partition("#")[2], 0) > 1):
                continue
            del found[word]
            found["$ref"] = to
        return found

    def pointer(self, name: str, base: str) -> str | None:
        """The pointer that a reference stands for; None if it leads out of the schema."""
        uri, fragment = urldefrag(base + name if name.startswith("#") else urljoin(base, name))
        if fragment and not fragment.startswith("/"):
            found = self.places.get(f"{uri}#{fragment}")
            return None if found is None else f"#{found}"
        found = self.places.get(uri)
        return None if found is None else f"#{found}{fragment}"


def _base(part: dict[str, Any], base: str) -> str:
    """The URI that holds within a part."""
    own = part.get("$id")
    return base if not isinstance(own, str) or own.startswith("#") else urldefrag(urljoin(base, own))[0]


def _below(part: dict[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """The schemas in a part, and the steps that lead to each."""
    for word, own in part.items():
        if word in _ONE:
            yield [word], own
        elif word in _LISTS and isinstance(own, list):
            yield from (([word, str(at)], each) for at, each in enumerate(own))
        elif word in _MAPS and isinstance(own, dict):
            yield from (([word, name], each) for name, each in own.items())
