"""Names of drafters, expanders, verifiers and diffusion policies, so that a line of text can choose one and set its fields.

The tables are made from the packages' exports: a class with an entry (`specjax.about`) is listed where it is exported.

- `prompt_lookup:length=8,ngram=3` sets fields, `eagle3:taps=1 15 28` a list of numbers.
- `prompt_lookup+token_recycling` fuses two drafters.
- A drafter that grows its tree with an expander takes `expander=NAME` and that expander's fields. For a chain of
  adapted length it takes `rule=NAME` and that rule's fields (`draft:rule=goodput,length=8`).
- A drafter made of others takes their lines (`rasd:draft=(eagle3:k=4),retriever=prompt_lookup`), or fields of the part
  that alone has them (`rasd:datastore=FOLDER`).
- `credit+threshold:threshold=0.8` puts one unmask policy in front of another.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax

from specjax import diffusion, draft, expand, search, soft, verify, warpers
from specjax.about import About, abouts, exported
from specjax.assembly import line
from specjax.assembly.companions import LOADERS, LONGEST, Parted, Ruled, Stored, of_several_passes, ready, stacked
from specjax.decoder import Decode
from specjax.diffusion import EntropyRenoise, cache, unmask
from specjax.draft import Drafter, fuse
from specjax.draft.adaptive import Rule
from specjax.expand import Chain, Expander
from specjax.models import caches
from specjax.search import SearchSettings, Selection
from specjax.verify import Verifier
from specjax.warpers import Warper


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name in the registry.

    Attributes:
      make: called with the fields that were set.
      fields: every field with its default.
      summary: what it does, in one line.
      source: the paper or origin.
      guarantee: see `specjax.about.GUARANTEES`.
      expander: the default line of its `expander`; empty if it grows no tree with one.
      paper: the fields of `preset=paper`, as a line has them; empty if there is no such preset.
      loads: what is loaded for it, a key of `specjax.assembly.companions.LOADERS`; empty for nothing.
      worded: the fields that may also be words, whatever their default.
      parts: the drafters that it is made of, with their default lines.
      apart: see `specjax.about.About.apart`.
    """

    make: Callable[..., Any]
    fields: dict[str, Any]
    summary: str = ""
    source: str = ""
    guarantee: str = ""
    expander: str = ""
    paper: str = ""
    loads: str = ""
    worded: frozenset[str] = frozenset()
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apart: bool = False

    @property
    def listed(self) -> dict[str, Any]:
        """Every field with its default; the expander and its fields come last."""
        fields = {**self.parts, **self.fields, **({"preset": "small"} if self.paper else {})}
        if not self.expander:
            return fields
        grown = line.read_line(self.expander)
        return {**fields, "expander": grown.name, **grown.fields}

    @property
    def published(self) -> dict[str, str]:
        """The fields of `preset=paper`."""
        return line.read_line(f"paper:{self.paper}").fields if self.paper else {}


def plain_fields(make: Callable[..., Any]) -> dict[str, Any]:
    """The arguments whose default is a number, a word, a switch or a list of numbers, with these defaults.

    A list that is not empty has decimal numbers.
    """
    defaults = {name: given.default for name, given in inspect.signature(make).parameters.items()}
    settable = lambda value: isinstance(value, (int, float, str)) or _is_list(value)
    return {name: default for name, default in defaults.items() if settable(default)}


def _is_list(default: Any) -> bool:
    return isinstance(default, tuple) and all(isinstance(item, float) for item in default)


def entry_of(kind: type, about: About) -> Entry:
    """The entry of a class under one of its names."""
    make = getattr(kind, about.make) if about.make else kind
    fields = {**plain_fields(make), **about.defaults}
    if about.fields is not None:
        given = inspect.signature(make).parameters
        fields = {name: fields.get(name, given[name].default) for name in about.fields}
    worded = frozenset(name for name in fields if _has_words(inspect.signature(make).parameters.get(name)))
    words = (about.summary, about.source, about.guarantee, about.expander, about.paper, about.loads, worded)
    of_parts = about.parts, about.apart
    if about.parts and not about.loads:
        whole = (lambda *parts, **chosen: make(parts, **chosen)) if about.apart else make
        parted = lambda *parts, **chosen: Parted(whole, parts, {**about.defaults, **chosen})
        return Entry(parted, fields, *words, *of_parts)
    if not about.loads:
        return Entry(lambda **chosen: make(**{**about.defaults, **chosen}), fields, *words)
    loader = LOADERS[about.loads]
    default = loader.default.format(name=abouts(kind)[0].name)

    def stored(*parts, **chosen):
        own = dict(zip(about.parts, parts, strict=True))
        return Stored(kind, chosen.pop(loader.option, default), {**about.defaults, **own, **chosen})

    return Entry(stored, {loader.option: default, **loader.also, **fields}, *words, *of_parts)


def _has_words(parameter: inspect.Parameter | None) -> bool:
    """Whether a parameter's annotation admits a word."""
    annotation = str(getattr(parameter, "annotation", ""))
    return "str" in annotation or "Literal" in annotation


def listed(kind: type, *packages: ModuleType) -> dict[str, Entry]:
    """The entries of every `kind` that the packages export, in their order.

    Raises:
      ValueError: if two have the same name.
    """
    found: dict[str, Entry] = {}
    for export in exported(kind, *packages):
        for about in abouts(export):
            if about.name in found:
                raise ValueError(f"{export.__name__} is called {about.name!r}, as another {kind.__name__} is")
            found[about.name] = entry_of(export, about)
    return found


DRAFTERS = listed(Drafter, draft)
EXPANDERS = listed(Expander, expand)
RULES = listed(Rule, draft)
"""Rules for a chain's length."""
VERIFIERS = listed(Verifier, verify)
WARPERS = listed(Warper, warpers)
SEARCHES = listed(SearchSettings, search)
STEPWISE = {name: entry for name, entry in listed(Decode, search).items() if name not in SEARCHES}
"""Step by step, or between two models."""
SELECTIONS = listed(Selection, search)
MIXERS = listed(soft.Mixer, soft)
UNMASKS = listed(unmask.Unmask, diffusion, unmask)
SAMPLERS = listed(EntropyRenoise, diffusion)
CACHES = listed(cache.Cache, cache)
"""Cache policies of diffusion models."""
OLDS = listed(caches.Old, caches)
"""Cache policies of autoregressive models."""


def aligned() -> dict[str, str]:
    """How texts under a constraint are distributed: keys of `specjax.constrain.kinds.DISTRIBUTIONS` by the way to decode or
    the option, the last one for all others.
    """
    own = {about.name: own.aligns for own in exported(SearchSettings, search) for about in abouts(own)}
    own |= {about.name: own.aligns for own in exported(Warper, warpers) if own.aligns for about in abouts(own)}
    named = {name: word for name, word in own.items() if word != SearchSettings.aligns}
    return {**named, "all others": SearchSettings.aligns}


def build_drafter(
    drafter: "str | Drafter | tuple[Drafter, Any]", target: Any, *, mesh: Any = None, tree: str = ""
) -> tuple[Drafter, Any]:
    """A drafter ready for a loaded target, and its parameters (None if it has none).

    Args:
      drafter: a line of text, a drafter without parameters, or a pair of drafter and parameters.
      target: from `specjax.models.load`.
      mesh: where to place a draft's parameters.
      tree: from `tree_of`: the expander for a line that takes one and names none; empty for the drafter's own.

    Raises:
      ValueError: for an unknown name or field (it lists the known ones), or anything that cannot be loaded for this
        target.
    """
    if isinstance(drafter, tuple):
        if len(drafter) != 2 or not isinstance(drafter[0], Drafter):
            raise ValueError("drafter must be a name, a drafter, or a pair of a drafter and its parameters")
        return drafter
    if isinstance(drafter, Drafter) and drafter.needs_params:
        raise ValueError(f"a {type(drafter).__name__} needs its parameters: give drafter=(drafter, params)")
    if isinstance(drafter, Drafter):
        return drafter, None
    parts = line.parts(drafter)
    lines = [_grown(drafter, tree)] if len(parts) == 1 else parts  # side by side, trees are taken as they are
    made = [parse("drafter", DRAFTERS, part) for part in lines]
    return functools.reduce(_fuse, (ready(part, target, mesh) for part in made))


def tree_of(verifier: Verifier) -> str:
    """A verifier's line for the trees that it judges, see `specjax.about.About.tree`."""
    return next((about.tree for about in abouts(type(verifier))), "")


def _grown(drafter: str, tree: str) -> str:
    """A drafter's line with another expander (see `About.tree`), unless it sets anything of its own tree."""
    asked = line.read_line(drafter, "drafter")
    entry = DRAFTERS.get(asked.name)
    if not tree or entry is None or not entry.expander:
        return drafter
    own = line.read_line(entry.expander)
    depth = _expander(own.name, own.fields).depth
    wanted = line.read_line(tree.format(depth=depth))
    free = entry.fields.keys() | EXPANDERS[wanted.name].fields.keys()
    if wanted.name == own.name or not asked.fields.keys() <= free:
        return drafter
    for name, value in {"expander": wanted.name, **wanted.fields}.items():
        drafter = drafter if name in asked.fields else line.extended(drafter, f"{name}={value}")
    return drafter


def _expander(name: str, fields: dict[str, str]) -> Expander:
    return EXPANDERS[name].make(**_values("expander", name, EXPANDERS[name].fields, fields))


def _fuse(a: tuple[Drafter, Any], b: tuple[Drafter, Any]) -> tuple[Drafter, Any]:
    params = None if a[1] is None and b[1] is None else (a[1], b[1])
    return fuse(a[0], b[0]), params


def make_verifier(spec: str) -> Verifier | Stored:
    """A verifier from its line of text, or the description of what must be loaded for one.

    Raises:
      ValueError: for an unknown name or field; it lists the known ones.
    """
    return parse("verifier", VERIFIERS, spec)


def build_verifier(verifier: "str | Verifier | tuple[Verifier, Any]", target: Any) -> tuple[Verifier, Any]:
    """A verifier ready for a loaded target, and its parameters (None if it has none).

    Args:
      verifier: a line of text, a verifier, or a pair of verifier and trained parameters.
      target: from `specjax.models.load`.

    Raises:
      ValueError: for an unknown name or field (it lists the known ones), or a verifier that cannot judge by this
        target.
    """
    if isinstance(verifier, tuple):
        return verifier[0].bind(target.lm), verifier[1]
    made = make_verifier(verifier) if isinstance(verifier, str) else verifier
    if isinstance(made, Stored):
        return made.load(target)
    if made.needs_params:
        raise ValueError(f"a {type(made).__name__} needs its parameters: give verifier=(verifier, params), or its line")
    made = made.bind(target.lm)
    init = functools.partial(made.init_params, None)  # nothing of it is drawn, and making a key would be a program
    return made, jax.eval_shape(init, target.params) if target.abstract else init(target.params)


def make_selection(spec: str) -> Selection:
    """A selection from its line of text.

    Raises:
      ValueError: for an unknown name or field; it lists the known ones.
    """
    return parse("selection", SELECTIONS, spec)


def make_mixer(spec: str) -> soft.Mixer:
    """A mixer of soft thinking from its line of text.

    Raises:
      ValueError: for an unknown name or field; it lists the known ones.
    """
    return parse("mixer of soft thinking", MIXERS, spec)


def make_unmask(spec: str) -> "unmask.Unmask | Stored":
    """An unmask policy from its line of text; `a+b` puts a in front of b.

    Raises:
      ValueError: for an unknown name or field (it lists the known ones), or a policy that cannot stand before another.
    """
    *outer, inner = line.parts(spec)
    policy = parse("unmask policy", UNMASKS, inner)
    if outer and of_several_passes(policy):
        raise ValueError(f"{inner.strip()!r} decides over more than one pass: put no policy before it")
    before = tuple(parse("unmask policy", UNMASKS, part) for part in outer)
    for part, wrapper in zip(outer, before, strict=True):
        if not isinstance(wrapper, unmask.Wrapper):
            able = ", ".join(name for name, entry in UNMASKS.items() if isinstance(entry.make(), unmask.Wrapper))
            raise ValueError(f"unmask policy {part.strip()!r} cannot stand before another; {able} can")
    if isinstance(policy, Stored):
        return dataclasses.replace(policy, before=before)
    return stacked(before, policy)


def make_sampler(spec: str, own: EntropyRenoise) -> EntropyRenoise:
    """The sampler of a model without a mask, from its line of text; fields that the line leaves out are as in `own`.

    Raises:
      ValueError: for an unknown name or field; it lists the known ones.
    """
    make = lambda **chosen: dataclasses.replace(own, **chosen)
    table = {name: dataclasses.replace(entry, make=make) for name, entry in SAMPLERS.items()}
    return parse("sampler of a model without a mask", table, spec)


def make_cache(spec: str) -> cache.Cache:
    """A cache policy from its line of text.

    Raises:
      ValueError: for an unknown name or field; it lists the known ones.
    """
    return parse("cache", CACHES, spec)


def make_old(spec: str) -> caches.Old:
    """A cache policy of an autoregressive model from its line of text.

    Raises:
      ValueError: for an unknown name or field; it lists the known ones.
    """
    return parse("cache of an autoregressive model", OLDS, spec)


def parse(kind: str, table: dict[str, Entry], spec: str) -> Any:
    """The object that a line of text makes from a table; `kind` is for errors.

    Raises:
      ValueError: for an unknown name or field (it lists the known ones), or a value that a field cannot take.
    """
    asked = line.read_line(line.of_json(spec), kind)
    return _make(kind, table, asked.name, asked.fields)


def _make(kind: str, table: dict[str, Entry], name: str, fields: dict[str, str]) -> Any:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; choose {', '.join(table)}")
    entry = table[name]
    made = _built(kind, entry, name, _preset(f"{kind} {name!r}", entry, fields))
    of_tree = fields.keys() - entry.fields.keys()  # an expander's, a rule's, or the preset's
    if not isinstance(made, Stored) or not entry.published or of_tree or entry.published.keys() & fields.keys():
        return made
    return dataclasses.replace(made, published=_built(kind, entry, name, {**entry.published, **fields}).fields)


def _preset(what: str, entry: Entry, fields: dict[str, str]) -> dict[str, str]:
    """A line's fields, on top of those of the preset that it names."""
    if "preset" not in fields or not entry.published:
        return fields
    own = {key: value for key, value in fields.items() if key != "preset"}
    if fields["preset"] not in ("paper", "small"):
        raise ValueError(f"{what} has the presets paper and small, not {fields['preset']!r}")
    if fields["preset"] == "small":
        return own
    clash = {"expander", "rule"} & own.keys() if entry.expander else set()
    if clash:
        raise ValueError(f"{what}: preset=paper and {min(clash)} both choose the tree: leave one of them out")
    return {**entry.published, **own}


def _built(kind: str, entry: Entry, name: str, fields: dict[str, str]) -> Any:
    if "rule" in fields and kind == "drafter":
        return _ruled(kind, entry, name, dict(fields))
    if entry.parts:
        return _parted(kind, entry, name, dict(fields))
    if not entry.expander:
        return entry.make(**_values(kind, name, entry.fields, fields, entry.worded))
    default = line.read_line(entry.expander)
    chosen = fields.get("expander", default.name)
    if chosen not in EXPANDERS:
        raise ValueError(f"unknown expander {chosen!r}; choose {', '.join(EXPANDERS)}")
    of_tree = EXPANDERS[chosen].fields
    values = _values(kind, name, {**entry.fields, "expander": default.name, **of_tree}, fields)
    values.pop("expander", None)
    preset = default.fields if chosen == default.name else {}
    tree = {key: values.pop(key) for key in list(values) if key in of_tree}
    expander = EXPANDERS[chosen].make(**{**_values("expander", chosen, of_tree, preset), **tree})
    made = entry.make(expander=expander, **values)
    if isinstance(made, Stored):
        made.kind.check_tree(expander)
    return made


def _parted(kind: str, entry: Entry, name: str, fields: dict[str, str]) -> Any:
    """A drafter made of others; a field that it lacks is that of the one part that has it."""
    lines = {part: _part(default, fields.pop(part, "")) for part, default in entry.parts.items()}
    for key in [key for key in fields if key not in entry.fields]:
        owners = [part for part, text in lines.items() if key in _settable(text)]
        if len(owners) > 1:
            raise ValueError(f"{kind} {name!r}: {' and '.join(owners)} have a field {key!r}: write {owners[0]}=(...)")
        if owners:
            lines[owners[0]] = line.extended(lines[owners[0]], f"{key}={line.spelt(fields.pop(key))}")
    values = _values(kind, name, {**entry.parts, **entry.fields}, fields, entry.worded)
    beside = [[parse(kind, DRAFTERS, one) for one in line.parts(line.of_json(text))] for text in lines.values()]
    fused = lambda made: functools.reduce(lambda a, b: Parted(fuse, (a, b), {}), made)
    parts = [one for made in beside for one in made] if entry.apart else [fused(made) for made in beside]
    return entry.make(*parts, **values)


def _part(default: str, asked: str) -> str:
    """A part's line; a text without drafters' names is what the default part loads, if it loads anything."""
    loads = DRAFTERS[line.read_line(line.parts(default)[0]).name].loads
    if not asked or not loads or all(line.read_line(part).name in DRAFTERS for part in line.parts(asked)):
        return asked or default
    return line.extended(default, f"{LOADERS[loads].option}={line.spelt(asked)}")


def _settable(text: str) -> set[str]:
    """The fields that a drafter's line may have, if it names one drafter."""
    if len(line.parts(text)) > 1:
        return set()
    asked = line.read_line(text)
    entry = DRAFTERS[asked.name]
    expander = asked.fields.get("expander", line.read_line(entry.expander).name if entry.expander else "")
    own = {"expander"} if entry.expander else set()
    return {*entry.listed, *own, *(EXPANDERS[expander].fields if expander in EXPANDERS else ())}


def _ruled(kind: str, entry: Entry, name: str, fields: dict[str, str]) -> Ruled:
    if entry.parts:
        raise ValueError(f"{kind} {name!r} takes no rule, since it grows no chain of its own: leave rule out")
    chosen = fields.pop("rule")
    if chosen not in RULES:
        raise ValueError(f"unknown rule {chosen!r}; choose {', '.join(RULES)}")
    grows = {"length": LONGEST} if entry.expander else {}  # a whole chain has its own length
    of_rule = grows | RULES[chosen].fields
    if clash := entry.fields.keys() & of_rule.keys():
        raise ValueError(
            f"{kind} {name!r} takes no rule {chosen!r}: both have a field {min(clash)!r}; set it up in Python"
        )
    values = _values(kind, name, entry.fields | {"rule": chosen} | of_rule, fields)
    rule = {key: values.pop(key) for key in list(values) if key in of_rule}
    length = rule.pop("length", 0)
    tree = {"expander": Chain(1)} if entry.expander else {}
    return Ruled(entry.make(**tree, **values), RULES[chosen].make(**rule), length)


def _values(
    kind: str, name: str, known: dict[str, Any], fields: dict[str, str], worded: frozenset[str] = frozenset()
) -> dict[str, Any]:
    values = {}
    for key, value in fields.items():
        if key not in known:
            raise ValueError(f"{kind} {name!r} has no field {key!r}; {_instead(kind, key, known)}")
        values[key] = _convert(f"{kind} {name!r}: {key}", value, known[key], key in worded)
    return values


def _instead(kind: str, key: str, known: dict[str, Any]) -> str:
    """The fields that there are, and which of them a wrong one may stand for."""
    fields = [*known, *(("verifier", "cache") if kind == "drafter" else ())]
    has = f"it has {', '.join(fields)}" if fields else "it has none"
    owners = [name for name, entry in EXPANDERS.items() if key in entry.fields] if "expander" in known else []
    if owners:
        return f"{has}; {key} is a field of expanders: add expander={' or '.join(owners)}"
    near = difflib.get_close_matches(key, fields, 1)
    return f"{has}; is {near[0]} meant?" if near else has


def _convert(what: str, value: str, default: Any, worded: bool) -> Any:
    kind = type(default)
    if default is None:
        return int(value) if value.isdecimal() else value
    if kind is bool:
        if value.lower() in ("true", "1", "false", "0"):
            return value.lower() in ("true", "1")
        if worded:
            return value
        raise ValueError(f"{what} must be true or false, got {value!r}")
    if kind is tuple:
        number, numbers = (float, "numbers") if default else (int, "whole numbers")
        try:
            return tuple(number(item) for item in value.split())
        except ValueError as error:
            raise ValueError(f"{what} must be {numbers} with spaces between them, got {value!r}") from error
    try:
        return kind(value)
    except ValueError as error:
        if worded:
            return value
        raise ValueError(f"{what} must be {kind.__name__}, got {value!r}") from error
