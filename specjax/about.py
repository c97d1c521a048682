"""The self-description of a method, an attribute of its class. The registry is made of these."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
GUARANTEES = {
    "same text": "what plain decoding writes at the same seed (of a diffusion model: `fixed` without a cache)",
    "same distribution": "another text at the same seed, of plain decoding's distribution",
    "own text": "a published sampler, which defines its text",
    "lossy": "may write what plain decoding would not",
}
"""What a method's text is worth beside plain decoding's."""


@dataclasses.dataclass(frozen=True)
class About:
    """The entry of a method in the registry and the listings.

    A class names itself in its own attribute `about`, or in a tuple of these where it has several names; what it inherits does
    not count. Without one it is for Python alone.

    Attributes:
      name: in a line of text.
      summary: what it does, in a line.
      source: the paper or origin.
      guarantee: a key of `GUARANTEES`; empty where another part decides, as the verifier does of a drafter's text.
      defaults: what a line that names no value takes in place of the class's own defaults.
      fields: those that a line may set; None: every one whose default is a number, a word, a switch or an empty list of
        numbers. One whose default is None is named here, or not listed.
      make: the class method that takes them; empty: the class itself.
      expander: the line of the expander that a drafter takes where none is named; empty: it takes none.
      paper: fields as published, as a line has them, where `defaults` and `expander` are for small models: `preset=paper` sets
        them, and a published head has them in any case.
      loads: what is loaded for it when the target is known, a key of `specjax.assembly.companions.LOADERS`; empty: nothing.
      tree: of a verifier: the line of the expander of the trees that it is for, which a drafter takes beside it where none is
        named; `{depth}` is as deep as the drafter's own. Empty: the drafter's own.

    Raises:
      ValueError: on a guarantee that there is not.
    """

    name: str
    summary: str
    source: str
    guarantee: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: tuple[str, ...] | None = None
    make: str = ""
    expander: str = ""
    paper: str = ""
    loads: str = ""
    tree: str = ""

    def __post_init__(self):
        if self.guarantee and self.guarantee not in GUARANTEES:
            raise ValueError(f"{self.name}: unknown guarantee {self.guarantee!r}; choose {', '.join(GUARANTEES)}")


Named = About | tuple[About, ...] | None
"""The type of the attribute `about`."""


def abouts(kind: type) -> tuple[About, ...]:
    """What a class says of itself, once for each of its names; nothing where it has none of its own."""
    own = vars(kind).get("about")
    return () if own is None else own if isinstance(own, tuple) else (own,)


def exported(kind: type[T], *packages: ModuleType) -> Iterator[type[T]]:
    """Every class of a kind that packages export and that says what it is, once each, in their order."""
    values = [value for package in packages for value in vars(package).values() if isinstance(value, type)]
    return (value for value in dict.fromkeys(values) if issubclass(value, kind) and abouts(value))
