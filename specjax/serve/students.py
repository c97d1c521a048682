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

from specjax.draft import ModelDrafter, OmniDraft
from specjax.draft.base import Drafter, TreeDrafter
from specjax.lm import LM, Wants
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

    def loss(self, target, params, fixed, target_params, texts):
        tokens, missed, lm = texts["tokens"], texts["missed"], self.drafter.lm
        text = SpeltTexts.of(fixed, tokens, lm.stretch * tokens.shape[1])
        learnt = missed & (text.begins > 0) & (text.ends <= text.tokens.shape[1])
        logits = read(lm.lm, params, Batch(text.tokens, text.of_tokens(learnt)), Wants(logits=True)).logits
        gram = learnt & (text.counts > 1) & (text.counts <= self.drafter.longest)
        chance = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        chance = jnp.take_along_axis(chance, text.tokens[:, 1:, None], axis=2)[..., 0]
        spelling = -MEAN(chance, text.of_tokens(gram)[:, 1:])
        taught = read(target, target_params, Batch(tokens, missed), Wants(logits=True)).logits[:, :-1]
        both = jnp.zeros((lm.vocab_size,), bool).at[fixed["ids"]].set(True)
        ours = jnp.take_along_axis(logits[..., fixed["columns"]], text.before[:, 1:, None], axis=1)
        divergence = self.divergence(
            taught[..., fixed["ids"]],
            ours,
            (learnt & both[tokens])[:, 1:],
            known=both[jnp.argmax(taught, axis=-1)],
            outside=jnp.where(both, 0, jax.nn.softmax(taught, axis=-1)).sum(axis=-1),
        )
        return divergence + self.spelling * spelling


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
    def ends(self) -> Array:
        """`[I, S]` int32, where the next token's spelling begins."""
        return self.begins + self.counts

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


_KINDS: dict[type, tuple[Any, Any]] = {ModelDrafter: (Watching, SameTokens), OmniDraft: (WatchingOther, OtherTokens)}


def student_of(drafter: Drafter, divergence: Loss | None = None) -> Student:
    """The student that drafts as a drafter does.

    Args:
      drafter: a `ModelDrafter` or an `OmniDraft`.
      divergence: of its loss; None: the usual one.

    Raises:
      ValueError: if it is neither.
    """
    if type(drafter) not in _KINDS:
        raise ValueError(f"online: a ModelDrafter or an OmniDraft learns, and {type(drafter).__name__} does not")
    watching, kind = _KINDS[type(drafter)]
    own = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    return kind(watching(**own), divergence or kind.usual)
