"""Drafts of adapted length: a chain that stops where going on does not pay (SpecDec++, arXiv:2405.19715).

The rule decides from the draft's side alone, before a token's own score is known, so the classical rejection rule keeps
its distribution. `rungs` makes a short draft cheap to verify. Levels that no live row needs are not computed. A rule
may also decide for the whole batch, from its load (`specjax.draft.goodput`).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from specjax.about import About, Named, abouts
from specjax.draft.base import Drafter, Proposal, TreeDrafter, View, of_inner, proposed
from specjax.expand.base import Expander
from specjax.expand.early_stop import EarlyStop, GoesOn
from specjax.lm import LM, Wants
from specjax.sharding.rules import replicated
from specjax.tree import Tree

if TYPE_CHECKING:  # imported only when it is needed
    from specjax.objectives.base import Objective

Array = jax.Array
PyTree = Any
Hidden = Callable[[Any], Array]
"""From a drafter's carry to the features `[B, E]` from which its last distribution was computed."""


@runtime_checkable
class ShowsFeatures(Protocol):
    """A drafter that shows the features `[B, E]` of its last distribution, given the carry of `grow`."""

    def hidden(self, carry: Any) -> Array: ...


class Rule(abc.ABC):
    """When a row stops drafting. Implementations are frozen dataclasses."""

    about: ClassVar[Named] = None
    """Its names in the registry."""

    of_rates: ClassVar[bool] = False
    """Whether it decides from the rows' acceptance so far alone, and not from the draft's own probabilities."""
    needs_features = False
    """Static: whether it reads the draft's features."""
    needs_scores = False
    """Static: whether it reads the draft's own confidence head; `start` then gets the head's scores in place of features."""
    together = False
    """Static: whether all rows stop together, at one of `lengths`.

    If so, its `GoesOn` is also asked at depth 0, whether to draft at all, and a row's draft depends on the others (see
    `Drafter.alone`).
    """

    @classmethod
    def objective(cls) -> "type[Objective] | None":
        """The objective with which `specjax train` fits its parameters, imported when needed. Its field `rule` is the rule.

        None if there are no parameters, or none that are trained here.
        """
        return None

    def for_target(self, target: LM) -> "Rule":
        """This rule made ready for a target (itself, if there is nothing to fill in)."""
        return self

    def lengths(self, length: int) -> tuple[int, ...]:
        """The lengths from which a rule for all rows together chooses, for chains of at most `length`."""
        return (0, *(rung - 1 for rung in EarlyStop(length).rungs))

    def init(self, batch: int) -> PyTree:
        """The rule's state; every leaf leads with `batch`."""
        return ()

    @abc.abstractmethod
    def start(self, params: PyTree, state: PyTree, view: View, length: int, hidden: Hidden | None) -> "GoesOn":
        """The rule of one step, for chains of at most `length`."""

    def observe(self, state: PyTree, tree: Tree, accepted: Array, live: Array) -> PyTree:
        """Learns from a verdict: `accepted` `[B]` draft tokens in rows that are `live` `[B]`."""
        return state


@dataclasses.dataclass(frozen=True)
class Confidence(Rule):
    """Stops below the first token whose confidence (see `EarlyStop`) is less than the threshold.

    Attributes:
      threshold: in [0, 1].
    """

    about = About("confidence", "a row stops where its draft is unsure", "arXiv:2404.18911, section 3.2")

    threshold: float = 0.4

    def start(self, params, state, view, length, hidden):
        return lambda depth, confidence, carry: confidence >= self.threshold


@dataclasses.dataclass(frozen=True)
class Scored(Rule):
    """Stops below the first token that the draft's own confidence head expects to be rejected (DSpark).

    DeepSpec leaves that token out; here it is still drafted, as with every rule.

    Attributes:
      threshold: in [0, 1]; 0 never stops.
    """

    about = About("scored", "a row stops where the draft's confidence head doubts a token", "deepseek-ai/DeepSpec")

    threshold: float = 0.5
    needs_scores = True

    def start(self, params, state, view, length, hidden):
        return lambda depth, confidence, carry: hidden(carry) >= self.threshold


@dataclasses.dataclass(frozen=True)
class Online(Rule):
    """Drafts the number of tokens that pays best at the row's own acceptance so far.

    With rate a, and a draft pass at `cost` of a target pass, k tokens give `(1 + a + ... + a^k) / (1 + cost k)` tokens
    per target pass; the best k is drafted. This is the form of SmartSpec's goodput (arXiv:2406.14066) at a fixed load.

    Attributes:
      cost: of a draft pass, relative to a target pass.
      decay: the factor by which past evidence is multiplied at every step.
      prior: the rate before any evidence, which weighs as one token.
    """

    about = About("online", "a row drafts what pays at its acceptance so far", "this library")
    of_rates = True

    cost: float = 0.2
    decay: float = 0.9
    prior: float = 0.7

    def __post_init__(self):
        if self.cost <= 0 or not 0 < self.decay <= 1 or not 0 < self.prior < 1:
            raise ValueError(f"online needs cost > 0, decay in (0, 1] and prior in (0, 1), got {self}")

    def init(self, batch):
        return jnp.full((batch,), self.prior), jnp.ones((batch,))

    def best(self, rate: Array, length: int) -> Array:
        """The length `[B]`, from 1 to `length`, that pays most at `rate` `[B]`."""
        drafted = jnp.arange(1, length + 1)[None]
        return 1 + jnp.argmax((1 + jnp.cumsum(rate[:, None] ** drafted, axis=1)) / (1 + self.cost * drafted), axis=1)

    def start(self, params, state, view, length, hidden):
        longest = self.best(state[0] / state[1], length)
        return lambda depth, confidence, carry: depth < longest

    def observe(self, state, tree, accepted, live):
        return judged(state, self.decay, tree, accepted, live)


@dataclasses.dataclass(frozen=True)
class RuledDrafter(Drafter):
    """A drafter whose chains end according to a rule; see `adaptive`.

    `params["draft"]` is {`drafter`: the drafter's own, `rule`: the rule's}.
    """

    drafter: Any
    rule: Rule

    needs_params = True
    needs_own_verdicts = True
    looks_back = of_inner("looks_back")
    skips = of_inner("skips")
    wants = of_inner("wants")
    prefill_wants = of_inner("prefill_wants")

    @property
    def rungs(self):
        levels = EarlyStop(self.depth).rungs
        return (1, *levels) if self.rule.together else levels

    @property
    def weighs_rungs(self):
        return self.rule.together

    @property
    def alone(self):
        return self.drafter.alone and not self.rule.together

    def init(self, params, batch, capacity):
        return self.drafter.init(self._own(params), batch, capacity), self.rule.init(batch)

    def axes(self, draft):
        rule = jax.tree.map(lambda x: ("batch",) + (None,) * (x.ndim - 1), draft[1])
        return self.drafter.axes(draft[0]), rule

    def param_shardings(self, mesh, params):
        if params is None:
            return None
        own = self.drafter.param_shardings(mesh, params["drafter"])
        return {"drafter": own, "rule": replicated(mesh, params["rule"])}

    def encode(self, params, draft, source, tokens):
        return self.drafter.encode(self._own(params), draft[0], source, tokens), draft[1]

    def prefill(self, params, draft, chunk, output):
        return self.drafter.prefill(self._own(params), draft[0], chunk, output), draft[1]

    def catch_up(self, params, draft, view):
        return self.drafter.catch_up(self._own(params), draft[0], view), draft[1]

    def observe(self, params, draft, proposal, output, verdict):
        inner = dataclasses.replace(proposal, draft=draft[0])
        seen = self.drafter.observe(self._own(params), draft[0], inner, output, verdict)
        return seen, self.rule.observe(draft[1], proposal.tree, verdict.accepted, verdict.committed > 0)

    def _own(self, params):
        return {**params, "draft": _part(params, "drafter")}


@dataclasses.dataclass(frozen=True)
class Adaptive(RuledDrafter, TreeDrafter):
    """A drafter with an expander under a rule: the levels that no live row needs are not drafted."""

    length: int = 8

    @property
    def expander(self) -> EarlyStop:
        return EarlyStop(self.length, 0.0)

    def bind(self, target: LM):
        inner: Any = self.drafter.growing(self.expander).bind(target)
        if self.rule.needs_features and not isinstance(inner, ShowsFeatures):
            raise ValueError(
                f"{type(self.rule).__name__} reads the draft's features, and {type(inner).__name__} shows none"
            )
        if self.rule.needs_scores and not getattr(inner, "confidence", False):
            raise ValueError(
                f"{type(self.rule).__name__} reads a confidence head, and this {type(inner).__name__} has none"
            )
        return dataclasses.replace(self, drafter=inner, rule=self.rule.for_target(target))

    def propose(self, params, draft, view, sampler):
        drafter: Any = self.drafter
        hidden = drafter.hidden if isinstance(drafter, ShowsFeatures) else None
        hidden = getattr(drafter, "score", None) if self.rule.needs_scores else hidden
        goes_on = self.rule.start(_part(params, "rule"), draft[1], view, self.length, hidden)
        inner, own = drafter.growing(_Ruled(self.expander, goes_on)), self._own(params)

        def grown(state):
            proposal = inner.propose(own, state, view, sampler)
            return proposal.tree, proposal.draft

        if self.rule.together:
            some = goes_on(0, jnp.ones(view.root.shape), None)[0]
            caught = lambda state: grown(inner.catch_up(own, state, view))
            tree, state = proposed(some, caught, draft[0], view)
        else:
            tree, state = grown(draft[0])
        return Proposal(tree, (state, draft[1]))


@dataclasses.dataclass(frozen=True)
class Cut(RuledDrafter):
    """A drafter that makes a whole chain at once, such as a look-up: the chain is cut where the rule says."""

    nodes = of_inner("nodes")
    depth = of_inner("depth")
    is_chain = of_inner("is_chain")
    children = of_inner("children")

    @property
    def rungs(self):
        return tuple(sorted({1, *super().rungs}))  # a look-up may find nothing

    def bind(self, target: LM):
        inner = self.drafter.bind(target)
        rule, name = (abouts(type(one))[0].name for one in (self.rule, inner))
        if not (inner.is_chain and inner.plain_tree):
            raise ValueError(
                f"rule={rule} ends chains, and {name} grows a tree or reads further slots: leave the rule out"
            )
        if inner.wants != Wants():
            raise ValueError(
                f"rule={rule} cuts chains that are copied, and {name} learns from the target: leave the rule out"
            )
        if not self.rule.of_rates:
            raise ValueError(
                f"rule={rule} reads a draft's probabilities, and {name} has none: choose one of {', '.join(_of_rates())}"
            )
        return dataclasses.replace(self, drafter=inner, rule=self.rule.for_target(target))

    def propose(self, params, draft, view, sampler):
        own = self._own(params)
        proposal = self.drafter.propose(own, self.drafter.catch_up(own, draft[0], view), view, sampler)
        goes_on = self.rule.start(_part(params, "rule"), draft[1], view, self.depth, None)
        sure = jnp.ones(view.root.shape)
        kept = jnp.stack([goes_on(depth, sure, None) for depth in range(self.depth)], axis=1)
        valid = proposal.tree.valid.at[:, 1:].min(jnp.cumprod(kept, axis=1).astype(bool))
        return Proposal(dataclasses.replace(proposal.tree, valid=valid), (proposal.draft, draft[1]))


@dataclasses.dataclass(frozen=True)
class _Ruled(Expander):
    """The chain of one step, with the rule bound to the rows' state."""

    chain: EarlyStop
    goes_on: GoesOn

    nodes = property(lambda self: self.chain.nodes)
    depth = property(lambda self: self.chain.depth)
    is_chain = True

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        return self.chain.run(root, logits, grow, carry, sampler, keep_q=keep_q, goes_on=self.goes_on)[0]


def adaptive(drafter: Drafter, rule: Rule, length: int = 8) -> RuledDrafter:
    """A drafter whose chain ends where the rule says. The text does not change.

    Args:
      drafter: any drafter that leaves its tree to an expander, which the chain replaces; or one that makes a whole chain at
        once, such as a look-up.
      rule: any; for whole chains one that decides from the rows' acceptance alone (`Rule.of_rates`).
      length: the longest chain; that of a drafter without an expander is its own.
    """
    grows = "expander" in {field.name for field in dataclasses.fields(drafter)}
    return Adaptive(drafter, rule, length) if grows else Cut(drafter, rule)


def judged(state: tuple[Array, Array], decay: float, tree: Tree, accepted: Array, live: Array) -> tuple[Array, Array]:
    """Evidence of acceptance after one more step: accepted tokens and judged ones, `[B]` each.

    Args:
      state: before the step.
      decay: the factor for past evidence.
      tree: the step's chain.
      accepted: `[B]`, how many of its tokens.
      live: `[B]` bool; other rows stay as they are.
    """
    drafted = tree.valid.sum(axis=1) - 1
    seen = jnp.minimum(accepted + 1, drafted)  # the accepted tokens, and the first rejected one
    hits, count = (decay * old + new for old, new in zip(state, (accepted, seen), strict=True))
    return jnp.where(live, hits, state[0]), jnp.where(live, count, state[1])


def _of_rates(kind: type = Rule) -> list[str]:
    """The names of the rules that decide from acceptance alone."""
    own = [abouts(kind)[0].name] if getattr(kind, "about", None) and kind.of_rates else []
    return own + [name for below in kind.__subclasses__() for name in _of_rates(below)]


def _part(params, name):
    return None if params["draft"] is None else params["draft"][name]
