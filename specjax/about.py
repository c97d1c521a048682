"""A method's description of itself, an attribute of its class; the registry is built from these."""

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
"""What a method guarantees about its text, compared with plain decoding's."""


@dataclasses.dataclass(frozen=True)
class About:
    """A method's entry in the registry and in the listings.

    A class sets its own attribute `about`, or a tuple of these if it has several names; an inherited entry does not
    count. A class without one can be used from Python only.

    Attributes:
      name: the name in a line of text.
      summary: one line on what the method does.
      source: the paper or origin.
      guarantee: a key of `GUARANTEES`. Empty if another part decides: for a drafter, the verifier does.
      defaults: replace the class's own defaults where the line gives no value.
      fields: the fields that a line may set. None means every field whose default is a number, a word, a switch or a
        list of numbers, empty or decimal; a field whose default is None is listed only if it is named here.
      make: the class method that takes the fields; empty for the class itself.
      expander: the line of the drafter's default expander; empty if the drafter takes none.
      paper: the published values of the fields, as a line writes them, where `defaults` and `expander` are for small
        models. `preset=paper` sets them; a published head always has them.
      loads: what is loaded for the method once the target is known, a key of `specjax.assembly.companions.LOADERS`;
        empty for nothing.
      tree: for a verifier, the line of the expander that makes its trees. A drafter without a named expander uses it;
        `{depth}` is the drafter's own depth. Empty keeps the drafter's expander.
      parts: for a drafter made of others, the arguments that are drafters, in order, with their default lines.
      apart: whether drafters side by side in a part stay apart, and the class takes all drafters as one tuple. Otherwise
        they are fused.

    Raises:
      ValueError: for an unknown guarantee.
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
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apart: bool = False

    def __post_init__(self):
        if self.guarantee and self.guarantee not in GUARANTEES:
            raise ValueError(f"{self.name}: unknown guarantee {self.guarantee!r}; choose {', '.join(GUARANTEES)}")


Named = About | tuple[About, ...] | None
"""The type of the attribute `about`."""


def abouts(kind: type) -> tuple[About, ...]:
    """The entries of a class, one for each of its names; empty if the class itself has none."""
    own = vars(kind).get("about")
    return () if own is None else own if isinstance(own, tuple) else (own,)


def exported(kind: type[T], *packages: ModuleType) -> Iterator[type[T]]:
    """All classes of a kind that the packages export and that have an entry, once each, in order."""
    values = [value for package in packages for value in vars(package).values() if isinstance(value, type)]
    return (value for value in dict.fromkeys(values) if issubclass(value, kind) and abouts(value))
