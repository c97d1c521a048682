"""Names for drafters, expanders, verifiers and diffusion policies, so that a line of text can choose one and set its fields.

`prompt_lookup:length=8,ngram=3` sets fields; `prompt_lookup+token_recycling` fuses two drafters. A drafter that grows its
tree with an expander takes `expander=NAME` and that expander's fields, or `rule=NAME` and that rule's for a chain of adapted
length (`draft:rule=goodput,length=8`). `credit+threshold:threshold=0.8` puts one unmask policy
in front of another.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from specjax.diffusion import cache, unmask
from specjax.diffusion.free_dave import FreeDave
from specjax.diffusion.renoise import EntropyRenoise
from specjax.diffusion.wino import Wino
from specjax.draft import (
    PPD,
    Clover2,
    Confidence,
    DiffuSpec,
    Drafter,
    DynamicExit,
    Eagle,
    Eagle3,
    Goodput,
    Hydra,
    Kangaroo,
    Lookahead,
    Medusa,
    NoDrafter,
    Online,
    PromptLookup,
    Rest,
    Stand,
    Swift,
    TokenRecycling,
    Trained,
    fuse,
)
from specjax.expand import Chain, EarlyStop, Expander, Static, TopK
from specjax.spec.companions import DiffusionDraft, DraftHead, DraftModel, DraftStore, Filter, Guide, Ruled, stacked
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

RULES: dict[str, Entry] = {
    "confidence": entry_of(Confidence, "a row stops where its draft is unsure", "arXiv:2404.18911, section 3.2"),
    "online": entry_of(Online, "a row drafts what pays at its acceptance so far", "this library"),
    "goodput": entry_of(Goodput, "all rows draft what pays at the load and their acceptance", "arXiv:2406.14066"),
}
"""Rules for a chain's length; that of a trained head (`Acceptance`) is for Python alone."""

VERIFIERS: dict[str, Entry] = {
    "coupled": entry_of(Coupled, "keep the target's own draw; same text as plain decoding, any tree", "this library"),
    "rejection": entry_of(
        Rejection, "accept with min(1, p/q), else draw the residual; chains only", "arXiv:2211.17192"
    ),
}


UNMASKS: dict[str, Entry] = {
    "threshold": entry_of(unmask.Threshold, "all that is surer than a threshold", "arXiv:2505.22618, section 3.3"),
    "fixed": entry_of(unmask.Fixed, "LLaDA's sampler: as many a pass that a block takes `steps`", "arXiv:2502.09992"),
    "free_dave": entry_of(FreeDave, "fixed, several steps a pass: the same text; no cache", "arXiv:2510.00294"),
    "dream": entry_of(unmask.Dream, "Dream's sampler: a linear schedule", "arXiv:2508.15487"),
    "factor": entry_of(unmask.Factor, "the n surest while (n + 1)(1 - c_n) <= factor", "arXiv:2505.22618, section 3.3"),
    "entropy": entry_of(unmask.EntropyBound, "all of at most so much entropy", "arXiv:2509.26488"),
    "local_leap": entry_of(unmask.LocalLeap, "a lower threshold near very sure tokens", "arXiv:2510.07081"),
    "hierarchy": entry_of(unmask.Hierarchy, "what is sure, and one token of every run of masks", "dInfer 2025"),
    "slow_fast": entry_of(
        unmask.SlowFast, "one token a pass until predictions settle, then all sure ones", "arXiv:2506.10848"
    ),
    "credit": entry_of(
        unmask.Credit, "raises what earlier passes predicted; put before another policy", "arXiv:2510.06133"
    ),
    "prophet": entry_of(unmask.Prophet, "commits a settled block whole; put before another policy", "arXiv:2508.19982"),
    "end_of_text": entry_of(
        unmask.EndOfText, "a committed end of text ends the canvas; put before another policy", "arXiv:2509.25188"
    ),
    "guided": entry_of(
        Guide, "what an autoregressive model would have said too, from left to right", "arXiv:2505.21467"
    ),
    "learn2pd": entry_of(Filter, "what a trained filter finds final", "arXiv:2509.25188"),
    "remdm": entry_of(unmask.ReMDM, "one token a pass, late ones redo the least sure", "arXiv:2503.00307"),
    "wino": entry_of(Wino, "commits boldly, opens what a second look doubts; no cache", "arXiv:2507.18578"),
    "rcr": entry_of(unmask.RunningConfidence, "writes all, opens the least sure again", "ParallelBench 2025"),
}

SAMPLERS: dict[str, Entry] = {
    "entropy_renoise": entry_of(
        EntropyRenoise, "keeps what is surest together, random tokens elsewhere", "arXiv:2505.24857, DiffusionGemma"
    ),
}

CACHES: dict[str, Entry] = {
    "none": entry_of(cache.NoCache, "computes the whole canvas in every pass; exact", "-"),
    "prefix": entry_of(
        cache.Prefix, "reuses what lies before the block, while it lasts", "arXiv:2505.22618, section 3.2"
    ),
    "dual": entry_of(cache.Dual, "reuses all but the block, while it lasts", "arXiv:2505.22618, section 3.2"),
    "delayed": entry_of(
        cache.Delayed, "reuses known tokens, from one pass after they became known", "arXiv:2505.15781"
    ),
    "greedy": entry_of(
        cache.Greedy, "the same, and of the open ones only the block's and neighbours", "arXiv:2505.15781"
    ),
    "freeze": entry_of(cache.Freeze, "freezes finished blocks for good", "arXiv:2505.21467"),
    "interval": entry_of(cache.Interval, "refreshes prompt and response at intervals of their own", "arXiv:2506.06295"),
    "vicinity": entry_of(cache.Vicinity, "computes the block and its neighbours", "dInfer 2025"),
}


def _rest(datastore: str = "pycode-rest", **chosen: Any) -> DraftStore:
    return DraftStore(Rest(**chosen), datastore)


def _draft(expander: Expander, model: str = "pycode-draft") -> DraftModel:
    return DraftModel(model, expander)


def _diffuspec(expander: Expander, model: str = "pycode-diffusion", **chosen: Any) -> DiffusionDraft:
    return DiffusionDraft(model, expander, chosen)


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
    "diffuspec": Entry(
        _diffuspec,
        {"model": "pycode-diffusion", "prior": DiffuSpec.prior, "decay": DiffuSpec.decay, "ahead": DiffuSpec.ahead},
        "a diffusion model's laws for all positions ahead, from one pass",
        "arXiv:2510.02358",
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


def make_unmask(spec: str) -> "unmask.Unmask | Guide | Filter":
    """An unmask policy from its line of text; `a+b` puts a in front of b.

    Raises:
      ValueError: on an unknown name or field, naming those there are, or a policy that stands in front of none.
    """
    *outer, inner = spec.split("+")
    policy = parse("unmask policy", UNMASKS, inner)
    if outer and isinstance(policy, Guide):
        raise ValueError(f"nothing stands before {inner.strip()!r}, which decides over more than one pass")
    before = tuple(parse("unmask policy", UNMASKS, part) for part in outer)
    for part, wrapper in zip(outer, before, strict=True):
        if not isinstance(wrapper, unmask.Wrapper):
            able = ", ".join(name for name, entry in UNMASKS.items() if isinstance(entry.make(), unmask.Wrapper))
            raise ValueError(f"unmask policy {part.strip()!r} cannot stand before another; {able} can")
    if isinstance(policy, Filter):
        return dataclasses.replace(policy, before=before)
    return stacked(before, policy)


def make_sampler(spec: str, own: EntropyRenoise) -> EntropyRenoise:
    """The sampler of a model without a mask, from its line of text; what the line leaves out is as in `own`.

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    make = lambda **chosen: dataclasses.replace(own, **chosen)
    table = {name: dataclasses.replace(entry, make=make) for name, entry in SAMPLERS.items()}
    return parse("sampler of a model without a mask", table, spec)


def make_cache(spec: str) -> cache.Cache:
    """A cache policy from its line of text.

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    return parse("cache", CACHES, spec)


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
    if "rule" in fields:
        return _ruled(kind, entry, name, dict(fields))
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


def _ruled(kind: str, entry: Entry, name: str, fields: dict[str, str]) -> Ruled:
    chosen = fields.pop("rule")
    if chosen not in RULES:
        raise ValueError(f"unknown rule {chosen!r}; choose {', '.join(RULES)}")
    of_rule = {"length": 8} | RULES[chosen].fields
    if clash := entry.fields.keys() & of_rule.keys():
        raise ValueError(
            f"{kind} {name!r} takes no rule {chosen!r}: both have a field {min(clash)!r}; set it up in Python"
        )
    values = _values(kind, name, entry.fields | {"rule": chosen} | of_rule, fields)
    rule = {key: values.pop(key) for key in list(values) if key in of_rule}
    length = rule.pop("length", of_rule["length"])
    return Ruled(entry.make(expander=Chain(), **values), RULES[chosen].make(**rule), length)


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
