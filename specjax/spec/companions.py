"""Drafters and policies with a model, a head or a store of their own, which are loaded when the target is known."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from specjax.diffusion import unmask
from specjax.diffusion.guided import Guided
from specjax.draft import DiffuSpec, Drafter, ModelDrafter, Rest, Trained, adaptive
from specjax.draft.adaptive import Rule
from specjax.expand import Expander


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
        draft = companion(self.model, target, mesh)
        if draft.masked is not None:
            raise ValueError(f"the draft model {draft.name!r} is a diffusion model: pick an autoregressive one")
        drafter = ModelDrafter(draft.lm, self.expander).bind(target.lm)
        check_vocabulary(draft, target)
        return drafter, draft.params


@dataclasses.dataclass(frozen=True)
class DiffusionDraft:
    """A diffusion model as the draft.

    Attributes:
      model: folder, shipped name or hub id.
      expander: how its tree grows.
      fields: of `DiffuSpec`, as they were set; the mask and the shift are the model's.
    """

    model: str
    expander: Expander
    fields: dict[str, Any]

    def load(self, target: Any, mesh: Any = None) -> tuple[DiffuSpec, Any]:
        """See `Stored.load`."""
        draft = companion(self.model, target, mesh)
        if draft.masked is None:
            raise ValueError(f"diffuspec drafts with a diffusion model; {draft.name!r} is autoregressive (use draft)")
        how = draft.masked
        if how.block:
            raise ValueError(f"diffuspec reads the whole text, and the blocks of {draft.name!r} do not see later ones")
        drafter = DiffuSpec(draft.lm, how.mask_id, self.expander, how.shift, **self.fields).bind(target.lm)
        check_vocabulary(draft, target, besides=how.mask_id)
        return drafter, draft.params


def companion(name: str, target: Any, mesh: Any) -> Any:
    """Another model, loaded as the target was: without weights where that has none."""
    from specjax import models

    return (models.abstract if target.abstract else models.load)(name, dtype=target.dtype, mesh=mesh)


def check_vocabulary(draft: Any, target: Any, besides: int = -1) -> None:
    """Raises ValueError where two models' tokenizers differ in a token; the one of id `besides` may."""
    if target.tokenizer is None or draft.tokenizer is None:
        return
    ours, theirs = ({i: t for t, i in model.tokenizer.get_vocab().items() if i != besides} for model in (draft, target))
    if any(ours[i] != theirs[i] for i in ours.keys() & theirs.keys()):
        raise ValueError(
            f"the draft model {draft.name!r} has another vocabulary than {target.name!r} (same size, other tokens): pick a "
            "draft with the target's tokenizer"
        )


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
        from specjax.draft.heads.folder import abstract_head, load_head

        if target.abstract:
            return abstract_head(self.kind, target, mesh, **self.fields)
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
        from specjax.draft.heads.datastore import load_datastore

        if target.abstract:
            raise ValueError("rest reads a datastore, which a configuration does not describe: choose another drafter")
        return self.drafter.bind(target.lm), load_datastore(self.datastore, target, mesh)


@dataclasses.dataclass(frozen=True)
class Ruled:
    """A drafter whose chains end by a rule.

    Attributes:
      drafter: the line without the rule; see `Stored`.
      rule: when a chain ends.
      length: the longest chain.
    """

    drafter: Any
    rule: Rule
    length: int

    def load(self, target: Any, mesh: Any = None) -> tuple[Drafter, Any]:
        """See `Stored.load`."""
        drafter, params = self.drafter.load(target, mesh)
        return adaptive(drafter, self.rule, self.length).bind(target.lm), {"drafter": params, "rule": None}


@dataclasses.dataclass(frozen=True)
class Guide:
    """An unmask policy with a guide that is loaded when the diffusion model is known.

    Attributes:
      model: folder, shipped name or hub id of an autoregressive model.
      top: see `Guided`.
    """

    model: str = "pycode"
    top: int = 1

    def load(self, target: Any, mesh: Any = None) -> tuple[Guided, dict[str, Any]]:
        """The policy, and what the decoder's parameters hold besides.

        Raises:
          ValueError: where it cannot be loaded, or has another vocabulary.
        """
        guide = companion(self.model, target, mesh)
        if guide.masked is not None:
            raise ValueError(f"the guide {guide.name!r} is a diffusion model: pick an autoregressive one")
        policy = Guided(guide.lm, self.top)
        if guide.lm.vocab_size == target.lm.vocab_size:
            check_vocabulary(guide, target, besides=target.masked.mask_id)
        return policy, {"guide": guide.params}


@dataclasses.dataclass(frozen=True)
class Filter:
    """A trained unmask policy, loaded when the diffusion model is known.

    Attributes:
      model: folder or hub id of the filter (`specjax train learn2pd`).
      threshold: see `Learn2PD`.
      before: policies that stand before it, the first one foremost.
    """

    model: str = ""
    threshold: float = unmask.Learn2PD.threshold
    before: tuple[unmask.Wrapper, ...] = ()

    def load(self, target: Any, mesh: Any = None) -> tuple[unmask.Unmask, dict[str, Any]]:
        """The policy, and what the decoder's parameters hold besides.

        Raises:
          ValueError: where it cannot be loaded, or belongs to another model.
        """
        from specjax.draft.heads.folder import abstract_head, load_head

        if target.abstract:
            policy, params = abstract_head(unmask.Learn2PD, target, mesh, threshold=self.threshold)
        elif not self.model:
            raise ValueError(
                "learn2pd needs a filter: train one (`specjax train learn2pd`) and name it with model=FOLDER"
            )
        else:
            policy, params = load_head(self.model, "learn2pd", unmask.Learn2PD, target, mesh, threshold=self.threshold)
        return stacked(self.before, policy), {"unmask": params}


def stacked(before: Sequence[unmask.Wrapper], policy: unmask.Unmask) -> unmask.Unmask:
    """A policy with others before it, the first one foremost."""
    for wrapper in reversed(before):
        policy = dataclasses.replace(wrapper, inner=policy)
    return policy
