"""Draft models that learn from a target's corrections: what they record while they draft, and their losses.

Shapes: `B` rows, `L` text buffer, `I` texts of `S` tokens, `M` draft tokens that spell them, `V` tokens of the target, `U`
that both models have.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import Acceptance, ModelDrafter, OmniDraft
from specjax.draft.acceptance import accept_log_prob
from specjax.draft.acceptance.objective import REJECT, weighted
from specjax.draft.adaptive import Adaptive
from specjax.draft.base import Drafter, TreeDrafter
from specjax.lm import LM, Block, Output, Wants
from specjax.objectives.base import Batch, read
from specjax.objectives.losses import ForwardKL, Loss, ReverseKL
from specjax.objectives.means import MEAN

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """The state of a drafter that `Watches`.

    Attributes:
      draft: the drafter's own.
      begin: `[B]` int32, how long each text was when the last step began.
      missed: `[B, L]` bool, tokens of the text where the target corrected the draft.
    """

    draft: Any
    begin: Any
    missed: Any


class Watches(TreeDrafter):
    """A drafter that records its corrections: a step's last token, unless the whole depth was accepted."""

    def init(self, params, batch, capacity) -> Any:
        none = jnp.zeros((batch, capacity), bool)
        return Watched(super().init(params, batch, capacity), jnp.zeros((batch,), jnp.int32), none)

    def axes(self, draft) -> Any:
        return Watched(super().axes(draft.draft), ("batch",), ("batch", None))

    def prefill(self, params, draft, chunk, output) -> Any:
        return dataclasses.replace(draft, draft=super().prefill(params, draft.draft, chunk, output))

    def catch_up(self, params, draft, view) -> Any:
        return dataclasses.replace(draft, draft=super().catch_up(params, draft.draft, view))

    def propose(self, params, draft, view, sampler):
        proposal = super().propose(params, draft.draft, view, sampler)  # pyrefly: ignore
        # a copy, since the decoder gives its own lengths away
        seen = dataclasses.replace(draft, draft=proposal.draft, begin=view.length + 0)
        return dataclasses.replace(proposal, draft=seen)

    def observe(self, params, draft, proposal, output, verdict):
        corrected = (verdict.accepted < self.depth) & (verdict.accepted < verdict.committed)
        at = jnp.where(corrected, draft.begin + verdict.accepted, draft.missed.shape[1])
        missed = draft.missed.at[jnp.arange(at.shape[0]), at].set(True, mode="drop")
        return dataclasses.replace(draft, missed=missed)


@dataclasses.dataclass(frozen=True)
class Watching(Watches, ModelDrafter):
    """A `ModelDrafter` that records its corrections."""


@dataclasses.dataclass(frozen=True)
class WatchingOther(Watches, OmniDraft):
    """An `OmniDraft` that records its corrections."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Judged(Watched):
    """The state of a `WatchingDrafts`.

    Attributes:
      drafted: `[B, L]` int32, the token that was drafted for each place of the text and judged there, plus 1; 0 where
        there was none.
    """

    drafted: Any


@dataclasses.dataclass(frozen=True)
class WatchingDrafts(WatchingOther):
    """An `OmniDraft` that records its corrections, and the tokens that were kept or corrected."""

    def init(self, params, batch, capacity) -> Any:
        own = super().init(params, batch, capacity)
        return Judged(own.draft, own.begin, own.missed, jnp.zeros((batch, capacity), jnp.int32))

    def axes(self, draft) -> Any:
        own = super().axes(draft)
        return Judged(own.draft, own.begin, own.missed, ("batch", None))

    def observe(self, params, draft, proposal, output, verdict):
        seen = super().observe(params, draft, proposal, output, verdict)
        depth = jnp.arange(1, proposal.tree.nodes)[None]
        # of a chain, the target judges the tokens that it keeps and the one that it corrects
        last = jnp.minimum(verdict.accepted + 1, verdict.committed)
        judged = proposal.tree.valid[:, 1:] & (depth <= last[:, None])
        at = jnp.where(judged, draft.begin[:, None] + depth - 1, draft.drafted.shape[1])
        rows = jnp.arange(at.shape[0])[:, None]
        drafted = draft.drafted.at[rows, at].set(proposal.tree.tokens[:, 1:] + 1, mode="drop")
        return dataclasses.replace(seen, drafted=drafted)


@dataclasses.dataclass(frozen=True)
class Student(abc.ABC):
    """A draft model that learns, and its loss. Implementations are frozen dataclasses: static and hashable.

    Attributes:
      drafter: records what it learns from.
      divergence: the loss between two distributions.
    """

    drafter: Any
    divergence: Loss

    usual: ClassVar[Loss]
    """The divergence if none is chosen."""
    watches: ClassVar[Mapping[str, Any]] = {"missed": np.bool_}
    """What is recorded of a text, by name, and its type."""

    def learns(self, params: PyTree) -> PyTree:
        """The part of the drafter's parameters that learns."""
        return params

    def fixed(self, params: PyTree) -> PyTree:
        """The part that the loss reads besides."""
        return ()

    def joined(self, params: PyTree, learnt: PyTree) -> PyTree:
        """The drafter's parameters with a part that has learnt."""
        return learnt

    def model(self, learnt: PyTree) -> PyTree:
        """The draft model's own parameters, of what `learns`."""
        return learnt

    def head(self, learnt: PyTree) -> PyTree | None:
        """The parameters of a head that ends drafts, of what `learns`; None if there is none."""
        return None

    def watched(self, draft: Any) -> dict[str, Array]:
        """What the drafter's state has recorded of the texts, `[B, L]` for each name in `watches`."""
        return {"missed": draft.missed}

    def due(self, texts: Mapping[str, np.ndarray]) -> bool:
        """Whether there is anything to learn from texts `[I, S]`; nothing stands before a text's first token."""
        return bool(texts["missed"][:, 1:].any())

    @abc.abstractmethod
    def loss(
        self, target: LM, params: PyTree, fixed: PyTree, target_params: PyTree, texts: Mapping[str, Array]
    ) -> Array:
        """The loss on corrected tokens, a scalar.

        Args:
          target: the teacher.
          params: the part that `learns`.
          fixed: the other one.
          target_params: the target's.
          texts: `tokens` `[I, S]` int32, and what was `watched` of them.
        """


@dataclasses.dataclass(frozen=True)
class SameTokens(Student):
    """A draft model with the target's tokens (arXiv:2310.07177): the divergence of both models' distributions."""

    usual = ForwardKL()

    def loss(self, target, params, fixed, target_params, texts):
        tokens, missed = texts["tokens"], texts["missed"]
        text = Batch(tokens, missed)
        taught = read(target, target_params, text, Wants(logits=True)).logits[:, :-1]
        own = read(self.drafter.lm, params, text, Wants(logits=True)).logits[:, :-1]
        return self.divergence(taught, own, missed[:, 1:], tokens[:, 1:])


@dataclasses.dataclass(frozen=True)
class OtherTokens(Student):
    """A draft model with tokens of its own, which drafts as `omnidraft` does, and the hybrid loss of arXiv:2507.02659.

    At a corrected token that both models have, the loss is the divergence of their distributions over all such tokens,
    where the target's likeliest token is one of them. At one that the draft model spells as an n-gram that it may draft,
    it is the negative log-probability of each of the n-gram's tokens. The two means are added, the second times
    `spelling`. Other tokens are never drafted, so nothing is learnt from them.

    Attributes:
      spelling: the authors' weight.
    """

    spelling: float = 0.2

    usual = ReverseKL()

    def learns(self, params):
        return params["lm"]

    def fixed(self, params):
        return {name: params[name] for name in ("ids", "columns", "spelling", "counts")}

    def joined(self, params, learnt):
        return {**params, "lm": learnt}

    @property
    def omni(self) -> OmniDraft:
        """The drafter with the draft model."""
        return self.drafter

    def loss(self, target, params, fixed, target_params, texts):
        return self.hybrid(fixed, texts, self.read(target, params, fixed, target_params, texts))

    def read(
        self, target: LM, params: PyTree, fixed: PyTree, target_params: PyTree, texts: Mapping[str, Array]
    ) -> "BothRead":
        """Texts as both models read them; `params` are the draft model's own."""
        tokens, lm = texts["tokens"], self.omni.lm
        text = SpeltTexts.of(fixed, tokens, lm.stretch * tokens.shape[1])
        own = read(lm.lm, params, Batch(text.tokens, jnp.ones(text.tokens.shape, bool)), Wants(logits=True))
        taught = read(target, target_params, Batch(tokens, texts["missed"]), Wants(logits=True)).logits[:, :-1]
        ours = jnp.take_along_axis(own.logits[..., fixed["columns"]], text.before[:, 1:, None], axis=1)
        both = jnp.zeros((lm.vocab_size,), bool).at[fixed["ids"]].set(True)
        return BothRead(text, own, ours, taught, both)

    def hybrid(self, fixed: PyTree, texts: Mapping[str, Array], seen: "BothRead") -> Array:
        """The hybrid loss of texts that both models have read."""
        text, both = seen.text, seen.both
        learnt = texts["missed"] & text.fits
        gram = learnt & (text.counts > 1) & (text.counts <= self.omni.longest)
        chance = jax.nn.log_softmax(seen.own.logits[:, :-1], axis=-1)
        chance = jnp.take_along_axis(chance, text.tokens[:, 1:, None], axis=2)[..., 0]
        spelling = -MEAN(chance, text.of_tokens(gram)[:, 1:])
        divergence = self.divergence(
            seen.taught[..., fixed["ids"]],
            seen.ours,
            (learnt & both[texts["tokens"]])[:, 1:],
            known=both[jnp.argmax(seen.taught, axis=-1)],
            outside=jnp.where(both, 0, jax.nn.softmax(seen.taught, axis=-1)).sum(axis=-1),
        )
        return divergence + self.spelling * spelling


@dataclasses.dataclass(frozen=True)
class OtherTokensAndHead(OtherTokens):
    """The same with a head that ends drafts early, which learns beside: the rule `acceptance` (SpecDec++, arXiv:2405.19715).

    A drafted token that the target judged has the label min(1, p/q), its chance to be kept in speculative sampling. The
    head reads the draft model's feature after the token and predicts the label, by the loss of
    `specjax.draft.acceptance.objective`. Both losses are added (joint training). The head's loss changes no
    parameter of the draft model. Only tokens that both models have are lessons for the head: to read an n-gram anew
    would take as many passes as it has tokens.

    Attributes:
      reject: the weight of a rejection; acceptance weighs 1.
    """

    reject: float = REJECT

    watches = {"missed": np.bool_, "drafted": np.int32}

    @property
    def omni(self):
        return self.drafter.drafter

    def learns(self, params):
        return {"draft": params["drafter"]["lm"], "head": params["rule"]}

    def fixed(self, params):
        return super().fixed(params["drafter"])

    def joined(self, params, learnt):
        return {"drafter": super().joined(params["drafter"], learnt["draft"]), "rule": learnt["head"]}

    def model(self, learnt):
        return learnt["draft"]

    def head(self, learnt):
        return learnt["head"]

    def watched(self, draft):
        return {"missed": draft[0].missed, "drafted": draft[0].drafted}

    def due(self, texts):
        return super().due(texts) or bool(texts["drafted"][:, 1:].any())

    def loss(self, target, params, fixed, target_params, texts):
        seen = self.read(target, params["draft"], fixed, target_params, texts)
        label, features, mask = jax.lax.stop_gradient(self.judged(params["draft"], fixed, texts, seen))
        head = weighted(accept_log_prob(params["head"], features), label, mask, self.reject)
        return self.hybrid(fixed, texts, seen) + head

    def judged(
        self, params: PyTree, fixed: PyTree, texts: Mapping[str, Array], seen: "BothRead"
    ) -> tuple[Array, Array, Array]:
        """Labels `[I, S - 1]`, features `[I, S - 1, E]` after the drafted tokens, and which of them are lessons.

        Args:
          params: the draft model's own.
          fixed: see `Student.fixed`.
          texts: see `Student.loss`.
          seen: the texts as both models read them.
        """
        text, count = seen.text, len(fixed["ids"])
        drafted = texts["drafted"][:, 1:] - 1
        token = jnp.maximum(drafted, 0)
        mask = (drafted >= 0) & seen.both[token] & text.fits[:, 1:]
        column = jnp.zeros(seen.both.shape, jnp.int32).at[fixed["ids"]].set(jnp.arange(count))[token]
        pick = lambda logits, at: jnp.take_along_axis(jax.nn.log_softmax(logits), at[:, :, None], axis=2)[..., 0]
        label = jnp.exp(jnp.minimum(pick(seen.taught, token) - pick(seen.ours, column), 0))
        # a drafted token stands where the text's own token is spelt, and sees the text before it and itself
        rows, own = text.tokens.shape
        place = text.begins[:, 1:]
        before = jnp.arange(own)[None, None] < place[:, :, None]
        itself = jnp.broadcast_to(jnp.eye(place.shape[1], dtype=bool)[None], (rows, *[place.shape[1]] * 2))
        visible = jnp.concatenate([before, itself], axis=2)
        block = Block(fixed["spelling"][token][..., 0], place, jnp.zeros((rows,), jnp.int32), visible)
        features = self.omni.lm.lm(params, block, None, wants=Wants(final=True), past=seen.own.delta).final
        return label, features, mask


@dataclasses.dataclass(frozen=True)
class BothRead:
    """Texts that a draft model and its target have read.

    Attributes:
      text: as the draft model spells them.
      own: its output, with logits and delta.
      ours: `[I, S - 1, U]`, its logits of tokens 1 to S - 1, for those that both models have.
      taught: `[I, S - 1, V]`, the target's.
      both: `[V]` bool, which tokens both have.
    """

    text: "SpeltTexts"
    own: Output
    ours: Array
    taught: Array
    both: Array


@dataclasses.dataclass(frozen=True)
class SpeltTexts:
    """Texts of the target's tokens, spelt by those of a draft model; what does not fit is left out.

    Attributes:
      tokens: `[I, M]` int32, the draft model's tokens.
      begins: `[I, S]` int32, where each token's spelling begins.
      counts: `[I, S]` int32, of how many tokens it is.
      slots: `[I, S, W]` int32, where each of these is; M beyond them.
    """

    tokens: Array
    begins: Array
    counts: Array
    slots: Array

    @classmethod
    def of(cls, tables: PyTree, tokens: Array, room: int) -> "SpeltTexts":
        """Of texts `[I, S]` with room for M tokens; `tables` are arrays of `specjax.draft.vocabularies.tables.Tables`."""
        rows = tokens.shape[0]
        counts, own = tables["counts"][tokens], tables["spelling"][tokens]
        begins = jnp.cumsum(counts, axis=1) - counts
        place = jnp.arange(own.shape[2])[None, None]
        at = jnp.where(place < counts[:, :, None], begins[:, :, None] + place, room)
        spelt = jnp.zeros((rows, room), jnp.int32)
        spelt = spelt.at[jnp.arange(rows)[:, None], at.reshape(rows, -1)].set(own.reshape(rows, -1), mode="drop")
        return cls(spelt, begins, counts, at)

    @property
    def fits(self) -> Array:
        """`[I, S]` bool, which tokens have their whole spelling in the room, and another token before it."""
        return (self.begins > 0) & (self.begins + self.counts <= self.tokens.shape[1])

    @property
    def before(self) -> Array:
        """`[I, S]` int32, the slot before each token's spelling: its logits are of the spelling's first token."""
        return jnp.clip(self.begins - 1, 0, self.tokens.shape[1] - 1)

    def of_tokens(self, mask: Array) -> Array:
        """`[I, M]` bool, the slots of those tokens `[I, S]` that are in `mask`."""
        rows, room = self.tokens.shape
        marks = jnp.broadcast_to(mask[:, :, None], self.slots.shape).reshape(rows, -1)
        at = self.slots.reshape(rows, -1)
        return jnp.zeros((rows, room), bool).at[jnp.arange(rows)[:, None], at].set(marks, mode="drop")


def learns(drafter: Any) -> bool:
    """Whether `student_of` takes a drafter."""
    return _kinds(drafter) is not None


def student_of(drafter: Drafter, divergence: Loss | None = None) -> Student:
    """The student that drafts as a drafter does.

    Args:
      drafter: a `ModelDrafter`, an `OmniDraft`, or an `OmniDraft` under the rule `acceptance`.
      divergence: of its loss; None: the usual one.

    Raises:
      ValueError: if it is none of these.
    """
    kinds = _kinds(drafter)
    if kinds is None:
        raise ValueError(
            "online: a ModelDrafter or an OmniDraft learns, the latter also with the rule acceptance, and "
            f"{type(drafter).__name__} does not"
        )
    watching, kind = kinds
    inner: Any = drafter.drafter if isinstance(drafter, Adaptive) else drafter
    own = watching(**{field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)})
    whole = dataclasses.replace(drafter, drafter=own) if isinstance(drafter, Adaptive) else own
    return kind(whole, divergence or kind.usual)


def _kinds(drafter: Any) -> tuple[Any, Any] | None:
    """What a drafter becomes to record what it learns from, and its student; None if it does not learn."""
    if isinstance(drafter, Adaptive):
        heads = type(drafter.drafter) is OmniDraft and isinstance(drafter.rule, Acceptance)
        return (WatchingDrafts, OtherTokensAndHead) if heads else None
    known = {ModelDrafter: (Watching, SameTokens), OmniDraft: (WatchingOther, OtherTokens)}
    return known.get(type(drafter))
