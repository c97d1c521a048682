"""Methods with a separate model, head or store, which is loaded once the target is known."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.about import abouts
from specjax.assembly.models_beside import (
    TARGET,
    beside,
    check_vocabulary,
    companion,
    draft_model,
    fitting,
    padded,
    shipped_name,
)
from specjax.assembly.other_vocabulary import shared
from specjax.diffusion.unmask import Unmask, Wrapper
from specjax.diffusion.unmask.learn2pd import read_filter
from specjax.draft import Drafter, ModelDrafter, OmniDraft, Tli, adaptive
from specjax.draft.adaptive import Rule
from specjax.draft.masks_on_disk import GAD, LUD, PARD, named_mask, read_mask
from specjax.draft.s2d.folder import named_exits
from specjax.expand import Chain
from specjax.lm import check_both_encode, encodes
from specjax.models import DEFAULT_MODEL
from specjax.models.drop_config import read_drops
from specjax.sharding.rules import replicated

LONGEST = 8
"""The most tokens of a chain that ends by a rule."""
BLANK = "\n\n"
"""A blank line."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A drafter, a verifier or an unmask policy for which something must be loaded.

    Attributes:
      kind: its class.
      asked: folder, shipped name or hub id of what is loaded; see `beside` and `found`.
      fields: as they were set.
      published: the fields for a published companion, whose defaults are the paper's; None: as they were set.
      before: for an unmask policy, those that stand before it, the first one foremost.
    """

    kind: type
    asked: str
    fields: dict[str, Any]
    published: dict[str, Any] | None = None
    before: tuple[Wrapper, ...] = ()

    @property
    def name(self) -> str:
        """Its folder's name for it: the first of its class's names."""
        return abouts(self.kind)[0].name

    def load(self, target: Any, mesh: Any = None) -> tuple[Any, Any]:
        """The method, bound to its target, and its parameters.

        Raises:
          ValueError: if they cannot be loaded, or belong to another target.
        """
        inner = {name: part for name, part in self.fields.items() if isinstance(part, Stored | Ruled | Parted)}
        made = {name: part.load(target, mesh)[0] for name, part in inner.items()}
        method, params = self.loader.load(dataclasses.replace(self, fields=self.fields | made), target, mesh)
        return stacked(self.before, method), params

    @property
    def loader(self) -> "Loader":
        """The loader."""
        return LOADERS[abouts(self.kind)[0].loads]

    def found(self, target: Any = None) -> str:
        """What is loaded: what the line asked for, or what is shipped with the target if it named nothing.

        Args:
          target: from `specjax.models.load` or `abstract`; None is `DEFAULT_MODEL`.

        Raises:
          ValueError: if a line named nothing, and nothing suitable is shipped.
        """
        from specjax import models
        from specjax.draft.heads.folder import shipped_heads

        asked = beside(self.asked, DEFAULT_MODEL if target is None else shipped_name(target))
        if asked != self.asked and not Path(asked).is_dir() and asked not in {**models.shipped(), **shipped_heads()}:
            what, how = (words.format(name=self.name) for words in (self.loader.what, self.loader.how))
            raise ValueError(
                f"no {what} is shipped beside {DEFAULT_MODEL if target is None else target.name!r}: name one with "
                f"{self.loader.option}=FOLDER ({how})"
            )
        return asked


@dataclasses.dataclass(frozen=True)
class Ruled:
    """A drafter whose chains end by a rule.

    Attributes:
      drafter: the line without the rule; its own tree is not used.
      rule: when a chain ends; its head may have to be loaded.
      length: the longest chain; 0 for `LONGEST`, or for the block of a drafter of blocks.
    """

    drafter: "Drafter | Stored"
    rule: "Rule | Stored"
    length: int

    def load(self, target: Any, mesh: Any = None) -> tuple[Drafter, Any]:
        """See `Stored.load`."""
        return self.over(*ready(self.drafter, target, mesh), target, mesh)

    def over(
        self, drafter: Drafter, params: Any, target: Any, mesh: Any = None, fresh: bool = False
    ) -> tuple[Drafter, Any]:
        """A loaded drafter under the rule, and the parameters of both.

        Args:
          drafter: bound to the target.
          params: its parameters.
          target: from `specjax.models.load`.
          mesh: where to place the parameters of the rule.
          fresh: whether a head that the line does not name is a new one, for a rule that learns on line.
        """
        length = self.length or min(LONGEST, getattr(drafter, "drafts", LONGEST))
        rule, own = self.rule, None
        if isinstance(rule, Stored):
            rule, own = _of_draft(rule, drafter, params, target, mesh, fresh)
        return adaptive(drafter, rule, length).bind(target.lm), {"drafter": params, "rule": own}


@dataclasses.dataclass(frozen=True)
class Parted:
    """A drafter made of others.

    Attributes:
      kind: what makes it; it takes them first.
      parts: the others.
      fields: its own, as they were set.
    """

    kind: Callable[..., Drafter]
    parts: "tuple[Drafter | Stored | Ruled, ...]"
    fields: dict[str, Any]

    def load(self, target: Any, mesh: Any = None) -> tuple[Drafter, Any]:
        """See `Stored.load`; the parameters are the parts', in their order."""
        drafters, params = zip(*(ready(part, target, mesh) for part in self.parts), strict=True)
        made = self.kind(*drafters, **self.fields).bind(target.lm)
        return made, None if all(own is None for own in params) else params


def _of_draft(rule: Stored, drafter: Any, params: Any, target: Any, mesh: Any, fresh: bool = False) -> tuple[Any, Any]:
    """A rule with a head over the features of a draft model, for which it is loaded; see `Ruled.over`."""
    if isinstance(drafter, ModelDrafter | OmniDraft) and fresh and not rule.asked:
        made = rule.kind(**rule.fields).bind(drafter.lm)
        head = made.init_params(jax.random.key(0), params)
        return made, head if mesh is None else jax.device_put(head, made.param_shardings(mesh, head))
    if not isinstance(drafter, ModelDrafter | OmniDraft):
        raise ValueError(
            f"the rule {rule.name} reads the features of a draft model, and {type(drafter).__name__} has none"
        )
    return rule.load(dataclasses.replace(target, lm=drafter.lm, params=params, name="the draft model"), mesh)


def ready(drafter: "Drafter | Stored | Ruled | Parted", target: Any, mesh: Any = None) -> tuple[Any, Any]:
    """A drafter and its parameters, loaded if it has any; see `Stored.load`."""
    return (drafter, None) if isinstance(drafter, Drafter) else drafter.load(target, mesh)


def stacked(before: Sequence[Wrapper], policy: Any) -> Any:
    """An unmask policy after others, the first one foremost."""
    for wrapper in reversed(before):
        policy = dataclasses.replace(wrapper, inner=policy)
    return policy


def of_several_passes(policy: "Unmask | Stored") -> bool:
    """Whether a policy that is loaded later names a decoder of its own, so that none can stand before it."""
    return isinstance(policy, Stored) and policy.kind.decoder is not Unmask.decoder


def _model(
    stored: Stored, target: Any, mesh: Any, named: Callable[[Any], dict[str, Any]] = lambda draft: {}
) -> tuple[Any, Any]:
    """A draft model; `named` are fields that its folder gives and a line may set anew."""
    from specjax.draft.heads.compact_folder import compact_folder, load_compact

    found = stored.found(target)
    folder = compact_folder(found)
    if folder is not None:
        lm, params = load_compact(f"the draft model {found!r}", folder, target, mesh)
        return stored.kind(lm, **stored.fields).bind(target.lm), params
    draft = draft_model(found, target, mesh)
    if stored.kind is ModelDrafter and _has_other_tokens(draft, target):
        return of_shared(Tli, stored, draft, target, mesh)
    drafter = stored.kind(padded(draft, target), **{**named(draft), **stored.fields}).bind(target.lm)
    check_vocabulary(draft, target)
    return drafter, draft.params


def _self_or_model(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    """A drafter of the target itself, or of the draft model that its line names, with the target's blank line."""
    words = () if target.tokenizer is None else target.tokenizer.encode(BLANK, add_special_tokens=False, verbose=False)
    stored = dataclasses.replace(stored, fields={"joint": tuple(words), **stored.fields})
    return _model(stored, target, mesh) if stored.asked else (stored.kind(**stored.fields).bind(target.lm), None)


def drafter_to_train(name: str, target: Any) -> tuple[Any, Any]:
    """A `ModelDrafter` with a draft model that is to be trained, or that training reads, and its parameters.

    Raises:
      ValueError: if it cannot be loaded, or has other tokens than the target.
    """
    drafter, params = Stored(ModelDrafter, name, {"expander": Chain()}).load(target)
    if type(drafter) is not ModelDrafter:
        raise ValueError(
            f"the draft model {name!r} has other tokens than {target.name!r}: it drafts as it is (draft:model={name}), "
            "and only a model with the target's tokenizer is trained for it"
        )
    return drafter, params


def _has_other_tokens(draft: Any, target: Any) -> bool:
    """Whether two tokenizers differ by more than padding."""
    try:
        padded(draft, target)
        check_vocabulary(draft, target)
    except ValueError:
        return True
    return False


def of_shared(kind: Any, stored: Stored, draft: Any, target: Any, mesh: Any, texts: bool = False) -> tuple[Any, Any]:
    """A drafter of a kind whose draft model has other tokens than the target."""
    lm, params = shared(draft, target, mesh, texts)
    return kind(lm, **stored.fields).bind(target.lm), params


def _other_text(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    return _other_model(stored, target, mesh, texts=True)


def _other_model(stored: Stored, target: Any, mesh: Any, texts: bool = False) -> tuple[Any, Any]:
    return of_shared(stored.kind, stored, other_draft(stored, target, mesh), target, mesh, texts)


def other_draft(stored: Stored, target: Any, mesh: Any) -> Any:
    """The draft model with tokens of its own that a drafter's line names.

    Raises:
      ValueError: if it cannot be loaded, or has its target's tokens by construction.
    """
    from specjax.draft.heads.compact_folder import compact_folder

    found = stored.found(target)
    if compact_folder(found) is not None:
        raise ValueError(f"the draft model {found!r} has the tokens of its target: use draft:model={found}")
    return draft_model(found, target, mesh)


def _sorted_draft(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    return _model(stored, target, mesh, named_exits)


def _masked_draft(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    draft = draft_model(stored.found(target), target, mesh)
    return _of_masks(stored, draft, target, PARD), draft.params


def _of_masks(stored: Stored, draft: Any, target: Any, key: str, **more: Any) -> Any:
    """The drafter of a draft model that reads masks; `more` are fields that its folder gives. `key` names the mask."""
    mask = read_mask(draft, key, stored.name)
    drafter = stored.kind(fitting(draft, target, mask), mask_id=mask, **stored.fields, **more).bind(target.lm)
    check_vocabulary(draft, target, besides=mask)
    return drafter


def _fed_draft(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    from specjax.draft.pard2.folder import read_joined

    asked = stored.found(target)
    draft = draft_model(asked, target, mesh)
    joined, fc = read_joined(asked, draft, target)
    fc = fc if mesh is None or target.abstract else jax.device_put(fc, replicated(mesh, fc))
    return _of_masks(stored, draft, target, PARD, joined=joined), {"lm": draft.params, "fc": fc}


def _block_draft(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    if not encodes(target.lm):
        raise ValueError(f"{stored.name} drafts for a target with an encoder, and {target.name} has none")
    draft = draft_model(stored.found(target), target, mesh, f"one that `specjax train {stored.name}` made")
    check_both_encode(draft.lm, target.lm, f"the block drafter {draft.name!r}")
    return _of_masks(stored, draft, target, GAD), draft.params


def _diffusion_model(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    draft = companion(stored.found(target), target, mesh)
    if draft.masked is None:
        raise ValueError(f"{stored.name} drafts with a diffusion model; {draft.name!r} is autoregressive (use draft)")
    if draft.any_subset:
        raise ValueError(f"{stored.name} drafts with a diffusion model; {draft.name!r} is {draft.kind}")
    how = draft.masked
    if how.block:
        raise ValueError(f"{stored.name} reads the whole text, but a block of {draft.name!r} does not see later blocks")
    drafter = stored.kind(draft.lm, how.mask_id, shift=how.shift, **stored.fields).bind(target.lm)
    check_vocabulary(draft, target, besides=how.mask_id)
    return drafter, draft.params


def _diffusion_and_trigrams(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    from specjax.draft.heads.trigrams import load_trigrams

    fields = dict(stored.fields)
    asked = fields.pop("trigrams", "")
    if asked and target.abstract:
        raise ValueError(f"{stored.name} reads trigrams, which a configuration does not describe: leave them out")
    drafter, params = _diffusion_model(dataclasses.replace(stored, fields=fields), target, mesh)
    tables = load_trigrams(asked, target, drafter.prior, mesh) if asked else None
    return drafter, {"model": params, "trigrams": tables}


def _guide(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    guide = companion(stored.found(target), target, mesh)
    if guide.masked is not None:
        raise ValueError(f"the guide {guide.name!r} is {guide.kind}: pick an autoregressive one")
    policy = stored.kind(guide.lm, **stored.fields)
    if guide.lm.vocab_size == target.lm.vocab_size:
        check_vocabulary(guide, target, besides=target.masked.mask_id)
    return policy, guide.params


def _head(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    from specjax.draft.heads.folder import abstract_head, load_head

    if target.abstract:
        return abstract_head(stored.kind, target, mesh, **stored.fields)
    return load_head(
        stored.found(target), stored.name, stored.kind, target, mesh, published=stored.published, **stored.fields
    )


def asked_of(stored: Stored, target: Any) -> str:
    """Folder, shipped name or hub id of a head.

    If none is named for a head that lies in a target's folder, it is that folder; for a shipped target it is the head
    shipped with it.

    Raises:
      ValueError: if the target has no folder, or none is named for a head that is not shipped with it.
    """
    from specjax.draft.heads.folder import shipped_heads

    if stored.asked or abouts(stored.kind)[0].loads != "own_head":
        return stored.found(target)
    shipped = f"{shipped_name(target)}-{stored.name}"
    if shipped in shipped_heads():
        return shipped
    if target.path is None:
        raise ValueError(
            f"{stored.name} reads a head in its target's folder, and {target.name} has none: name model=FOLDER"
        )
    return str(target.path)


def _rule_head(stored: Stored, draft: Any, mesh: Any) -> tuple[Any, Any]:
    if not (stored.asked or draft.abstract):
        raise ValueError(
            f"{stored.name} needs a head: train one (`specjax train {stored.name}`) and name it with head=FOLDER"
        )
    return _head(stored, draft, mesh)


def _own_head(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    return _head(
        stored if target.abstract else dataclasses.replace(stored, asked=asked_of(stored, target)), target, mesh
    )


def _pad(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    if stored.asked and not stored.asked.isdecimal():
        raise ValueError(f"{stored.name}: pad must be the id of a token of the target, got {stored.asked!r}")
    pad = int(stored.asked) if stored.asked else named_mask(target, LUD)
    if pad is None:
        raise ValueError(
            f"{target.name!r} names no mask token ({LUD} in config.json): `specjax train lud` makes a model that does; "
            "lud:pad=ID names the pad of one that learned it elsewhere"
        )
    return stored.kind(pad, **stored.fields).bind(target.lm), None


def _own_mask(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    """A drafter that is the target in its diffusion mode, with an adapter for that mode if the line names one."""
    from specjax.models.loading import changed_parts

    fields = dict(stored.fields)
    asked = fields.pop("adapter", "")
    if stored.asked and not stored.asked.isdecimal():
        raise ValueError(f"{stored.name}: mask must be the id of a token of the target, got {stored.asked!r}")
    if not stored.asked and target.dual is None:
        raise ValueError(
            f"{stored.name} drafts with a model of both kinds, and {target.name!r} does not say that it is one (as "
            f"Nemotron-Labs-Diffusion does): {stored.name}:mask=ID names the mask of one that learned it elsewhere"
        )
    mask = int(stored.asked) if stored.asked else target.dual.mask_id
    params = changed_parts(target, asked) if asked else None
    drafter = stored.kind(mask, **fields, adapted=params is not None).bind(target.lm)
    if params is not None and mesh is not None:
        params = jax.device_put(params, drafter.param_shardings(mesh, params))
    return drafter, params


def _prompted(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    if target.tokenizer is None:
        raise ValueError(
            f"{stored.name} reads a prompt, and {target.name} has no tokenizer: give {stored.kind.__name__} its token ids in "
            "Python"
        )
    ids = target.tokenizer.encode(f" {stored.asked}", add_special_tokens=False, verbose=False)
    return stored.kind(tuple(ids), **stored.fields).bind(target.lm), None


def _filter(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    if not (stored.asked or target.abstract):
        raise ValueError(
            f"{stored.name} needs a filter: train one (`specjax train {stored.name}`) and name it with model=FOLDER"
        )
    bare = Path(stored.asked) / "filter.safetensors"
    return _head(stored, target, mesh) if target.abstract or not bare.is_file() else _bare_filter(stored, bare, mesh)


def _bare_filter(stored: Stored, file: Path, mesh: Any) -> tuple[Any, Any]:
    """A filter that names neither its target nor its policy's fields."""
    params = read_filter(file)
    width, hidden = params["first"]["kernel"].shape
    policy = stored.kind(**{"block_length": width, "hidden": hidden, **stored.fields})
    return policy, params if mesh is None else jax.device_put(params, policy.param_shardings(mesh, params))


def _datastore(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    from specjax.draft.heads.datastore import load_datastore

    if target.abstract:
        raise ValueError(
            f"{stored.name} reads a datastore, which a configuration does not describe: choose another drafter"
        )
    return stored.kind(**stored.fields).bind(target.lm), load_datastore(stored.found(target), target, mesh)


def _vectors(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    """A drafter of the target's main experts, with the vectors of a folder if the line names one."""
    if not stored.asked:
        return stored.kind(**stored.fields).bind(target.lm), None
    from specjax.draft.main_experts.folder import read_vectors

    if target.abstract:
        raise ValueError(f"{stored.name} reads vectors, which a configuration does not describe: leave them out")
    keep, vectors = read_vectors(stored.asked, target.lm, target.dtype)
    drafter = stored.kind(**{**stored.fields, "keep": stored.fields.get("keep") or keep}, vectors=True).bind(target.lm)
    return drafter, jax.device_put(vectors, None if mesh is None else replicated(mesh, vectors))


def _texts(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    """A drafter with the texts of a datastore, if the line names one."""
    if not stored.asked:
        return stored.kind(**stored.fields).bind(target.lm), None
    drafter, store = _datastore(stored, target, mesh)
    return dataclasses.replace(drafter, filled=True), store


def _skipped(stored: Stored, target: Any, mesh: Any) -> tuple[Any, Any]:
    """A drafter with a list of left-out sublayers, if the line names one."""
    if not stored.asked:
        return stored.kind(**stored.fields).bind(target.lm), None
    return stored.kind(**stored.fields, skipped=read_drops(stored.asked)).bind(target.lm), None


@dataclasses.dataclass(frozen=True)
class Loader:
    """The loader of a kind of companion.

    Attributes:
      load: from what is stored, the target and a mesh to the method and its parameters; see `Stored.load`.
      default: what is loaded if a line names nothing; `{name}` is the method's (see `Stored.name`).
      option: the field of a line that names it.
      what: what it loads, and how to get it, if that may be shipped with a target; `{name}` is the method's.
      how: see `what`.
      also: further fields of a line that the loader reads, with their defaults.
    """

    load: Callable[[Stored, Any, Any], tuple[Any, Any]]
    default: str
    option: str = "model"
    what: str = ""
    how: str = ""
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)


_DIFFUSION = {"what": "diffusion model", "how": "a smaller one with its tokenizer"}
LOADERS: dict[str, Loader] = {
    "model": Loader(_model, f"{TARGET}-draft", what="draft model", how="a smaller model with its tokenizer"),
    "self_or_model": Loader(_self_or_model, ""),
    "other_model": Loader(_other_model, f"{TARGET}-draft", what="draft model", how="a smaller model of any tokenizer"),
    "other_text": Loader(_other_text, f"{TARGET}-draft", what="draft model", how="a smaller model of any tokenizer"),
    "sorted_draft": Loader(
        _sorted_draft,
        f"{TARGET}-draft",
        what="draft model",
        how="a smaller model with its tokenizer; `specjax train s2d` trains its exits",
    ),
    "masked_draft": Loader(
        _masked_draft,
        f"{TARGET}-pard",
        what="PARD model",
        how="`specjax train pard` makes one of a draft model",
    ),
    "fed_draft": Loader(
        _fed_draft,
        f"{TARGET}-pard2",
        what="PARD-2 model",
        how="`specjax train pard2` makes one of a draft model",
    ),
    "block_draft": Loader(
        _block_draft,
        f"{TARGET}-gad",
        what="block drafter",
        how="`specjax train gad` makes one for a target with an encoder",
    ),
    "diffusion_model": Loader(_diffusion_model, f"{TARGET}-diffusion", **_DIFFUSION),
    "diffusion_and_trigrams": Loader(
        _diffusion_and_trigrams, f"{TARGET}-diffusion", **_DIFFUSION, also={"trigrams": ""}
    ),
    "head": Loader(
        _head, TARGET + "-{name}", what="head for {name}", how="`specjax train {name}` makes one for a target"
    ),
    "prompt": Loader(_prompted, "Check the draft above and write it again:", option="prompt"),
    "pad": Loader(_pad, "", option="pad"),
    "own_mask": Loader(_own_mask, "", option="mask", also={"adapter": ""}),
    "own_head": Loader(_own_head, ""),
    "rule_head": Loader(_rule_head, "", option="head"),
    "datastore": Loader(
        _datastore, f"{TARGET}-rest", "datastore", "datastore", "`specjax datastore build` makes one for a target"
    ),
    "texts": Loader(_texts, "", "datastore"),
    "vectors": Loader(_vectors, "", option="vectors"),
    "skipped": Loader(_skipped, "", "layers"),
    "guide": Loader(_guide, TARGET, what="guide", how="an autoregressive model with its tokenizer"),
    "filter": Loader(_filter, ""),
}
"""By the values of `About.loads`."""
