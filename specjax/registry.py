"""Names for drafters, expanders and verifiers, so that a line of text can choose one and set its fields.

`prompt_lookup:length=8,ngram=3` sets fields; `prompt_lookup+token_recycling` fuses two drafters. A drafter that grows its
tree with an expander takes `expander=NAME` and that expander's fields.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

from specjax.draft import (
    PPD,
    Clover2,
    Drafter,
    DynamicExit,
    Eagle,
    Eagle3,
    Hydra,
    Kangaroo,
    Lookahead,
    Medusa,
    ModelDrafter,
    NoDrafter,
    PromptLookup,
    Rest,
    Stand,
    Swift,
    TokenRecycling,
    Trained,
    fuse,
)
from specjax.expand import Chain, EarlyStop, Expander, Static, TopK
from specjax.verify import Coupled, Rejection, Verifier


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name in the registry.

    Attributes:
      make: called with the fields that were set.
      fields: every field with its default.
      summary: what it does, in a line.
      source: the paper or origin.
      expander: the default line of its `expander`; empty where it grows no tree with one.
    """

    make: Callable[..., Any]
    fields: dict[str, Any]
    summary: str
    source: str
    expander: str = ""


def entry_of(kind: type, summary: str, source: str, **defaults: Any) -> Entry:
    """The entry of a dataclass: its fields are those whose default is a number, a word or a switch."""
    return Entry(lambda **chosen: kind(**{**defaults, **chosen}), {**_plain(kind), **defaults}, summary, source)


def _plain(kind: type) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(kind) if isinstance(f.default, (int, float, str))}


EXPANDERS: dict[str, Entry] = {
    "chain": entry_of(Chain, "one token a level, drawn with the position's own noise", "arXiv:2211.17192"),
    "early_stop": entry_of(EarlyStop, "a chain that ends where the draft is unsure", "arXiv:2404.18911, section 3.2"),
    "static": Entry(
        Static.from_counts,
        {"tree": "3 | 2 1 | 1 0 0 | 1 | 1"},
        "a tree of fixed shape, given by child counts level by level",
        "arXiv:2401.10774, section 2.1.2",
    ),
    "top_k": entry_of(
        TopK, "a dynamic tree ranked by the chance to be the target's draw given the noise", "this library"
    ),
    "eagle2": entry_of(
        TopK, "a dynamic tree ranked by draft probability", "arXiv:2406.16858, section 4", coupled=False
    ),
}

VERIFIERS: dict[str, Entry] = {
    "coupled": entry_of(Coupled, "keep the target's own draw; same text as plain decoding, any tree", "this library"),
    "rejection": entry_of(
        Rejection, "accept with min(1, p/q), else draw the residual; chains only", "arXiv:2211.17192"
    ),
}


class Stored(Protocol):
    """A drafter whose parameters lie in a folder: loaded when the target is known."""

    def load(self, target: Any, mesh: Any = None) -> tuple[Drafter, Any]:
        """The drafter, bound to its target, and its parameters.

        Raises:
          ValueError: where they cannot be loaded, or belong to another target.
        """
        ...


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A draft model.

    Attributes:
      model: folder, shipped name or hub id of the draft.
      expander: how its tree grows.
    """

    model: str
    expander: Expander

    def load(self, target: Any, mesh: Any = None) -> tuple[ModelDrafter, Any]:
        """See `Stored.load`."""
        from specjax import models

        draft = models.load(self.model, dtype=target.dtype, mesh=mesh)
        drafter = ModelDrafter(draft.lm, self.expander).bind(target.lm)
        if target.tokenizer is not None and draft.tokenizer is not None:
            if target.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
                raise ValueError(
                    f"the draft model {draft.name!r} has another vocabulary than {target.name!r} (same size, other "
                    "tokens): pick a draft with the target's tokenizer"
                )
        return drafter, draft.params


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """A trained drafter.

    Attributes:
      name: of the head, as its folder says.
      kind: its class.
      model: folder, shipped name or hub id.
      fields: as they were set; those that its parameters depend on come from the folder.
    """

    name: str
    kind: type[Trained]
    model: str
    fields: dict[str, Any]

    def load(self, target: Any, mesh: Any = None) -> tuple[Drafter, Any]:
        """See `Stored.load`."""
        from specjax.models.heads.folder import load_head

        return load_head(self.model, self.name, self.kind, target, mesh, **self.fields)


@dataclasses.dataclass(frozen=True)
class DraftStore:
    """A retrieval drafter and its datastore.

    Attributes:
      drafter: not bound yet.
      datastore: folder, shipped name or hub id.
    """

    drafter: Rest
    datastore: str

    def load(self, target: Any, mesh: Any = None) -> tuple[Drafter, Any]:
        """See `Stored.load`."""
        from specjax.models.heads.datastore import load_datastore

        return self.drafter.bind(target.lm), load_datastore(self.datastore, target, mesh)


def _rest(datastore: str = "pycode-rest", **chosen: Any) -> DraftStore:
    return DraftStore(Rest(**chosen), datastore)


def _draft(expander: Expander, model: str = "pycode-draft") -> DraftModel:
    return DraftModel(model, expander)


def _head(
    name: str, kind: type[Trained], summary: str, source: str, expander: str = "", **defaults: Any
) -> Entry:  # fmt: skip
    """`name` is that of the head on disk and of its shipped folder."""
    default = f"pycode-{name}"
    make = lambda model=default, **chosen: DraftHead(name, kind, model, {**defaults, **chosen})
    return Entry(make, {"model": default, **_plain(kind), **defaults}, summary, source, expander)


DRAFTERS: dict[str, Entry] = {
    "none": entry_of(NoDrafter, "plain decoding", "-"),
    "prompt_lookup": entry_of(PromptLookup, "copies what followed the last n-gram earlier in the text", "Saxena 2023"),
    "token_recycling": entry_of(TokenRecycling, "a table of each token's latest likely successors", "arXiv:2408.08696"),
    "stand": entry_of(Stand, "a table of the target's average laws after its last tokens", "arXiv:2506.04708"),
    "rest": Entry(
        _rest,
        {"datastore": "pycode-rest", **_plain(Rest)},
        "what followed the last tokens in a datastore (`specjax datastore build`)",
        "arXiv:2311.08252",
    ),
    "draft": Entry(
        _draft,
        {"model": "pycode-draft"},
        "a small model of the same vocabulary",
        "arXiv:2211.17192, arXiv:2302.01318",
        "chain",
    ),
    "medusa": _head(
        "medusa", Medusa, "heads that each guess one token further ahead", "arXiv:2401.10774", "static:tree=2 | 1"
    ),
    "hydra": _head("hydra", Hydra, "Medusa's heads made to see the tokens above", "arXiv:2402.05109", "chain:length=2"),
    "eagle1": _head("eagle1", Eagle, "autoregression on the target's features", "arXiv:2401.15077", "chain:length=3"),
    "eagle2": _head(
        "eagle1", Eagle, "EAGLE-1's head with a dynamic tree", "arXiv:2406.16858", "top_k:k=2,depth=3,nodes=6"
    ),
    "eagle3": _head("eagle3", Eagle3, "autoregression on three layers' features", "arXiv:2503.01840", "chain:length=3"),
    "clover2": _head(
        "clover2", Clover2, "recurrent heads with attention to the last token", "arXiv:2408.00264", "chain:length=3"
    ),
    "ppd": _head("ppd", PPD, "trained prompt tokens behind every node guess what follows it", "arXiv:2405.18628"),
    "kangaroo": _head(
        "kangaroo",
        Kangaroo,
        "the target's first layers and a small adapter",
        "arXiv:2404.18911",
        length=4,
        threshold=0.3,
    ),
    "swift": entry_of(
        Swift,
        "the target with some layers left out, which ones it finds as it goes",
        "arXiv:2410.06916",
        length=4,
        width=1,
        threshold=0.4,
        trials=64,
        patience=32,
    ),
    "del": entry_of(DynamicExit, "the target's first layers, as many as pay", "arXiv:2504.05598"),
    "lookahead": entry_of(Lookahead, "n-grams from a Jacobi window that the target reads beside", "arXiv:2402.02057"),
}


def build_drafter(
    drafter: "str | Drafter | tuple[Drafter, Any]", target: Any, *, mesh: Any = None
) -> tuple[Drafter, Any]:
    """A drafter ready for a loaded target, and its parameters (None where it has none).

    Args:
      drafter: a line of text, a drafter without parameters, or a pair of drafter and parameters.
      target: what `specjax.models.load` returned.
      mesh: where to place a draft's parameters.

    Raises:
      ValueError: on an unknown name or field, naming those there are, or what cannot be loaded for this target.
    """
    if isinstance(drafter, tuple):
        if len(drafter) != 2 or not isinstance(drafter[0], Drafter):
            raise ValueError("drafter must be a name, a drafter, or a pair of a drafter and its parameters")
        return drafter
    if isinstance(drafter, Drafter) and drafter.needs_params:
        raise ValueError(f"a {type(drafter).__name__} needs its parameters: give drafter=(drafter, params)")
    if isinstance(drafter, Drafter):
        return drafter, None
    made = [parse("drafter", DRAFTERS, part) for part in drafter.split("+")]
    parts = [(part, None) if isinstance(part, Drafter) else part.load(target, mesh) for part in made]
    return functools.reduce(_fuse, parts)


def _fuse(a: tuple[Drafter, Any], b: tuple[Drafter, Any]) -> tuple[Drafter, Any]:
    params = None if a[1] is None and b[1] is None else (a[1], b[1])
    return fuse(a[0], b[0]), params


def make_verifier(spec: str) -> Verifier:
    """A verifier from its line of text.

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    return parse("verifier", VERIFIERS, spec)


def parse(kind: str, table: dict[str, Entry], spec: str) -> Any:
    """What a line of text makes of a table; `kind` is for errors.

    Raises:
      ValueError: on an unknown name or field, naming those there are, or a value that a field cannot take.
    """
    name, _, rest = spec.strip().partition(":")
    fields = {}
    for item in filter(None, (item.strip() for item in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{kind} {spec!r}: {item!r} is not FIELD=VALUE")
        fields[key.strip()] = value.strip()
    return _make(kind, table, name.strip(), fields)


def _make(kind: str, table: dict[str, Entry], name: str, fields: dict[str, str]) -> Any:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; choose {', '.join(table)}")
    entry = table[name]
    if not entry.expander:
        return entry.make(**_values(kind, name, entry.fields, fields))
    default, _, settings = entry.expander.partition(":")
    chosen = fields.get("expander", default)
    if chosen not in EXPANDERS:
        raise ValueError(f"unknown expander {chosen!r}; choose {', '.join(EXPANDERS)}")
    of_tree = EXPANDERS[chosen].fields
    values = _values(kind, name, {**entry.fields, "expander": default, **of_tree}, fields)
    values.pop("expander", None)
    preset = dict(item.split("=") for item in settings.split(",") if item) if chosen == default else {}
    tree = {key: values.pop(key) for key in list(values) if key in of_tree}
    expander = EXPANDERS[chosen].make(**{**_values("expander", chosen, of_tree, preset), **tree})
    return entry.make(expander=expander, **values)


def _values(kind: str, name: str, known: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    values = {}
    for key, value in fields.items():
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{kind} {name!r} has no field {key!r}; {has}")
        values[key] = _convert(f"{kind} {name!r}: {key}", value, known[key])
    return values


def _convert(what: str, value: str, default: Any) -> Any:
    kind = type(default)
    if kind is bool:
        if value.lower() in ("true", "1", "false", "0"):
            return value.lower() in ("true", "1")
        raise ValueError(f"{what} must be true or false, got {value!r}")
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{what} must be {kind.__name__}, got {value!r}") from error
