"""Names for drafters, expanders and verifiers, so that a line of text can choose one and set its fields.

`prompt_lookup:length=8,ngram=3` sets fields; `prompt_lookup+token_recycling` fuses two drafters.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from specjax.draft import Drafter, ModelDrafter, NoDrafter, PromptLookup, TokenRecycling, fuse
from specjax.expand import Chain, Expander, Static, TopK
from specjax.verify import Coupled, Rejection, Verifier


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name in the registry.

    Attributes:
      make: called with the fields that were set.
      fields: every field with its default.
      summary: what it does, in a line.
      source: the paper or origin.
    """

    make: Callable[..., Any]
    fields: dict[str, Any]
    summary: str
    source: str


def _entry(kind: type, summary: str, source: str, **defaults: Any) -> Entry:
    own = {f.name: f.default for f in dataclasses.fields(kind) if isinstance(f.default, (int, float, str))}
    fields = {**own, **defaults}
    return Entry(lambda **chosen: kind(**{**defaults, **chosen}), fields, summary, source)


EXPANDERS: dict[str, Entry] = {
    "chain": _entry(Chain, "one token a level, drawn with the position's own noise", "arXiv:2211.17192"),
    "static": _entry(Static, "a tree of fixed shape", "arXiv:2401.10774, section 2.1.2"),
    "top_k": _entry(
        TopK, "a dynamic tree ranked by the chance to be the target's draw given the noise", "this library"
    ),
    "eagle2": _entry(TopK, "a dynamic tree ranked by draft probability", "arXiv:2406.16858, section 4", coupled=False),
}

VERIFIERS: dict[str, Entry] = {
    "coupled": _entry(Coupled, "keep the target's own draw; same text as plain decoding, any tree", "this library"),
    "rejection": _entry(Rejection, "accept with min(1, p/q), else draw the residual; chains only", "arXiv:2211.17192"),
}


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A drafter that still needs its model: loaded when the target is known.

    Attributes:
      model: folder, shipped name or hub id of the draft.
      expander: how its tree grows.
    """

    model: str
    expander: Expander


def _draft(model: str = "pycode-draft", expander: str = "chain", **fields: Any) -> DraftModel:
    return DraftModel(model, _make("expander", EXPANDERS, expander, fields))


DRAFTERS: dict[str, Entry] = {
    "none": _entry(NoDrafter, "plain decoding", "-"),
    "prompt_lookup": _entry(PromptLookup, "copies what followed the last n-gram earlier in the text", "Saxena 2023"),
    "token_recycling": _entry(TokenRecycling, "a table of each token's latest likely successors", "arXiv:2408.08696"),
    "draft": Entry(
        _draft,
        {"model": "pycode-draft", "expander": "chain", "length": 4},
        f"a small model of the same vocabulary; expander is one of {', '.join(EXPANDERS)}, whose fields may be set",
        "arXiv:2211.17192, arXiv:2302.01318",
    ),
}


def make_drafter(spec: str) -> Drafter | DraftModel | tuple:
    """A drafter from its line of text; a `DraftModel` (or a pair of parts to fuse) where a model must be loaded first.

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    parts = [_parse("drafter", DRAFTERS, part) for part in spec.split("+")]
    if any(isinstance(part, DraftModel) for part in parts) and len(parts) > 1:
        return tuple(parts)
    return functools.reduce(fuse, parts)


def make_verifier(spec: str) -> Verifier:
    """A verifier from its line of text.

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    return _parse("verifier", VERIFIERS, spec)


def build_drafter(
    drafter: "str | Drafter | tuple[Drafter, Any]", target: Any, *, mesh: Any = None
) -> tuple[Drafter, Any]:
    """A drafter ready for a loaded target, and its parameters (None where it has none).

    Args:
      drafter: a line of text, a drafter without parameters, or a pair of drafter and parameters.
      target: what `specjax.models.load` returned.
      mesh: where to place a draft model.

    Raises:
      ValueError: see `make_drafter`; also where the draft model cannot be loaded or has another vocabulary.
    """
    if isinstance(drafter, tuple):
        if len(drafter) != 2 or not isinstance(drafter[0], Drafter):
            raise ValueError("drafter must be a name, a drafter, or a pair of a drafter and its parameters")
        return drafter
    if isinstance(drafter, ModelDrafter):
        raise ValueError("a ModelDrafter needs its parameters: give drafter=(drafter, params)")
    if isinstance(drafter, Drafter):
        return drafter, None
    made = make_drafter(drafter)
    parts, params = [], None
    for part in made if isinstance(made, tuple) else (made,):
        if isinstance(part, DraftModel):
            if params is not None:
                raise ValueError(f"drafter {drafter!r}: only one part may be a draft model")
            part, params = _load_draft(part, target, mesh)
        parts.append(part)
    return functools.reduce(fuse, parts), params


def _load_draft(spec: DraftModel, target: Any, mesh: Any) -> tuple[Drafter, Any]:
    from specjax import models

    draft = models.load(spec.model, dtype=target.dtype, mesh=mesh)
    drafter = ModelDrafter(draft.lm, spec.expander).bind(target.lm)
    if target.tokenizer is not None and draft.tokenizer is not None:
        if target.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
            raise ValueError(
                f"the draft model {draft.name!r} has another vocabulary than {target.name!r} (same size, other tokens): "
                "pick a draft with the target's tokenizer"
            )
    return drafter, draft.params


def _parse(kind: str, table: dict[str, Entry], spec: str) -> Any:
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
    known = dict(entry.fields)
    if name == "draft":
        expander = fields.get("expander", known["expander"])
        if expander not in EXPANDERS:
            raise ValueError(f"unknown expander {expander!r}; choose {', '.join(EXPANDERS)}")
        known = {"model": known["model"], "expander": known["expander"], **EXPANDERS[expander].fields}
    values = {}
    for key, value in fields.items():
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{kind} {name!r} has no field {key!r}; {has}")
        values[key] = _convert(f"{kind} {name!r}: {key}", value, known[key])
    return entry.make(**values)


def _convert(what: str, value: Any, default: Any) -> Any:
    if not isinstance(value, str):
        return value
    kind = type(default)
    if kind is bool:
        if value.lower() in ("true", "1", "false", "0"):
            return value.lower() in ("true", "1")
        raise ValueError(f"{what} must be true or false, got {value!r}")
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{what} must be {kind.__name__}, got {value!r}") from error
