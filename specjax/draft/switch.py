"""Of several drafters, each row's step takes the one that has paid best so far: a bandit (BanditSpec, arXiv:2505.15141).

In the shape descriptions `B` denotes rows, `M` members, `W` watched ones, `N` nodes of the largest tree.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Drafter, Proposal, proposed
from specjax.lm import Wants
from specjax.tree import DRAWN, Topology, Tree

Array = jax.Array

FADE = 0.998
"""The factor by which what all rows have seen is multiplied for every step of a row."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """For each look-up a tree that it proposed in this step or an earlier one, while the text follows it.

    Attributes:
      tokens: `[B, W, N]` int32, -1 where there is no node.
      parents: `[B, W, N]` int32.
      depths: `[B, W, N]` int32.
      reached: `[B, W, N]` bool, nodes whose path the text has followed so far; the root is one.
      age: `[B, W]` int32, tokens committed since the tree was proposed; 0 if the next step's tree takes its place.
    """

    tokens: Array
    parents: Array
    depths: Array
    reached: Array
    age: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evidence:
    """What members have given so far.

    Attributes:
      tokens: `[B, M]` float32, tokens of the row's steps with each member, older ones with less weight.
      steps: `[B, M]` float32, the number of these steps, weighted alike.
      all_tokens: `[M]` float32, the same of all rows, ended ones too; they share it. None if each is on its own.
      all_steps: `[M]` float32, or None.
      chosen: `[B]` int32, the member of the current step.
      watched: what look-ups have proposed; None if none is watched.
    """

    tokens: Array
    steps: Array
    all_tokens: Array | None
    all_steps: Array | None
    chosen: Array
    watched: Watched | None = None


@dataclasses.dataclass(frozen=True)
class Switch(Drafter):
    """In every step each row takes the proposal of one of several drafters. The text does not change.

    Member i has been tried in n_i steps of this row and N_i of all rows, with a mean of m_i tokens in the row and M_i
    in all. The row takes the member with the largest

    `((n_i m_i + pool M_i) / (n_i + pool) + explore sqrt(ln(1 + T) / (n_i + N_i))) / cost_i`

    where T is the sum of all n and N. This is UCBSpec's index (BanditSpec, algorithm 2) with counts that fade, as
    text changes (discounted UCB, arXiv:0805.3415). Ours: rows begin with what all rows have seen, because a
    single text is too short to try every member. Nothing is drawn and no clock is read: the choice depends on the
    accepted tokens of earlier steps and on what look-ups find.

    Members without parameters (look-ups) draft in every step. Their trees are judged by how far the text follows them, any
    member's tokens included. A tree that the text has followed to its end so far is kept and followed on in the next steps.
    While such a tree is followed, newer trees of its look-up are not judged. So a long copy counts in full, although other
    members commit it piece by piece.

    A step with a look-up gives one token more than its tree is deep at most, and its index is bounded by that. If it
    proposes nothing, the step gives one token, and says nothing about the look-up. So a look-up is taken where it has
    something to copy, and judged by its worth there. The bound leaves out look-ups that draw, for a choice by drawn
    tokens would change their distribution.

    Other members draft only if a row takes them. Rows begin alike, so they mostly try members together. The target reads
    as many nodes as the largest tree that a row takes. Whatever is learnt from the text, every member learns from every
    step; a draft model reads what it has missed when it is taken again.

    With `pool=0` a row uses its own steps alone, and then `rejection` can judge the drafts, if it can judge those of
    every member. Its `params["draft"]` is the tuple of the members' parameters, None for one without.

    Attributes:
      members: the drafters.
      costs: a step with each member, in steps of plain decoding, as words with spaces between them. Empty: all cost the
        same, so that tokens per step decide. `Goodput.cost` estimates them from measured times.
      decay: the factor by which a row's evidence is multiplied in every step.
      explore: the weight of what is not known yet, in tokens; 0 never tries again.
      pool: the weight of what all rows have seen, in steps of the row; 0 for rows on their own.
      watch: whether look-ups are judged in steps that another member takes.
    """

    about = About(
        "switch", "of several drafters the one that has paid best, for each row", "arXiv:2505.15141",
        fields=("costs", "decay", "explore", "pool", "watch"), parts={"drafters": "prompt_lookup+suffix"}, apart=True,
    )  # fmt: skip

    members: tuple[Drafter, ...]
    costs: str = ""
    decay: float = 0.9
    explore: float = 0.3
    pool: float = 8.0
    watch: bool = True

    needs_own_verdicts = True

    def __post_init__(self):
        if len(self.members) < 2:
            raise ValueError(f"switch chooses between two drafters at least, got {len(self.members)}")
        if not 0 <= self.decay < 1 or not self.explore >= 0 or not self.pool >= 0:
            raise ValueError(
                f"switch needs a decay in [0, 1), explore >= 0 and pool >= 0, got decay={self.decay}, "
                f"explore={self.explore}, pool={self.pool}"
            )
        if len(self.prices) != len(self.members) or min(self.prices) <= 0:
            raise ValueError(
                f"switch needs a cost above 0 for each of its {len(self.members)} drafters, got {self.costs!r}"
            )

    @property
    def prices(self) -> tuple[float, ...]:
        """Static: `costs` as numbers."""
        try:
            return tuple(float(word) for word in self.costs.split()) or (1.0,) * len(self.members)
        except ValueError as error:
            raise ValueError(f"switch needs numbers with spaces between them as costs, got {self.costs!r}") from error

    @property
    def watched(self) -> tuple[bool, ...]:
        """Static: the members that draft in every step."""
        return tuple(self.watch and not member.needs_params for member in self.members)

    @property
    def look_ups(self) -> tuple[int, ...]:
        """Static: which members are watched."""
        return tuple(index for index, watched in enumerate(self.watched) if watched)

    @property
    def bounded(self) -> tuple[bool, ...]:
        """Static: the watched members whose index is bounded by the tree that they propose."""
        pairs = zip(self.watched, self.members, strict=True)
        return tuple(watched and member.children not in DRAWN for watched, member in pairs)

    @property
    def nodes(self) -> int:
        return max(member.nodes for member in self.members)

    @property
    def depth(self) -> int:
        return max(member.depth for member in self.members)

    @property
    def is_chain(self) -> bool:
        return all(member.is_chain for member in self.members)

    @property
    def children(self):
        """Of chains, copied tokens count as drawn from a certain distribution. Trees of several kinds are taken as they are."""
        kinds = {member.children for member in self.members}
        if self.is_chain:
            return "coupled" if kinds & {*DRAWN} else "deterministic"
        return kinds.pop() if len(kinds) == 1 else "deterministic"

    @property
    def alone(self) -> bool:
        return not self.pool and all(member.alone for member in self.members)

    @property
    def skips(self) -> bool:
        return all(member.skips for member in self.members)

    @property
    def looks_back(self) -> float:
        return max(member.looks_back for member in self.members)

    @property
    def needs_params(self) -> bool:
        return any(member.needs_params for member in self.members)

    @property
    def rungs(self) -> tuple[int, ...]:
        return tuple(sorted({rung for member in self.members for rung in member.rungs}))

    @property
    def wants(self) -> Wants:
        return _all_of(member.wants for member in self.members)

    @property
    def prefill_wants(self) -> Wants:
        return _all_of(member.prefill_wants for member in self.members)

    def bind(self, target):
        for member in self.members:
            if not member.plain_tree:
                raise ValueError(
                    f"switch takes drafters that propose a tree and nothing else; {type(member).__name__} adds slots of its "
                    "own or a head start for the target: use it alone"
                )
            if member.needs_own_verdicts:
                raise ValueError(
                    f"switch takes no {type(member).__name__}, which learns from how its own drafts are judged and would "
                    "get other members' verdicts: use it alone, or, if it has a rule, leave the rule out"
                )
        return dataclasses.replace(self, members=tuple(member.bind(target) for member in self.members))

    def recording(self, keep_q):
        return dataclasses.replace(self, members=tuple(member.recording(keep_q) for member in self.members))

    def init(self, params, batch, capacity):
        none = lambda *shape: jnp.zeros(shape, jnp.float32)
        count = len(self.members)
        shared = (none(count), none(count)) if self.pool else (None, None)
        whole = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        watched = None
        if self.look_ups:
            nodes = len(self.look_ups), max(self.members[index].nodes for index in self.look_ups)
            watched = Watched(whole(*nodes) - 1, whole(*nodes), whole(*nodes), whole(*nodes) > 0, whole(*nodes[:1]))
        seen = Evidence(none(batch, count), none(batch, count), *shared, whole(), watched)
        return seen, self._each("init", params, None, batch, capacity)

    def axes(self, draft):
        row: Any = ("batch", None)
        shared: Any = (None,) if self.pool else None
        nodes: Any = ("batch", None, None)
        watched = Watched(nodes, nodes, nodes, nodes, row) if self.look_ups else None
        own = Evidence(row, row, shared, shared, row[:1], watched)
        return own, tuple(member.axes(state) for member, state in zip(self.members, draft[1], strict=True))

    def param_shardings(self, mesh, params):
        if params is None:
            return None
        return tuple(
            None if own is None else member.param_shardings(mesh, own)
            for member, own in zip(self.members, params, strict=True)
        )

    def encode(self, params, draft, source, tokens):
        return draft[0], self._each("encode", params, draft[1], source, tokens)

    def prefill(self, params, draft, chunk, output):
        return draft[0], self._each("prefill", params, draft[1], chunk, output)

    def catch_up(self, params, draft, view):
        return draft[0], self._each("catch_up", params, draft[1], view)

    def propose(self, params, draft, view, sampler):
        draft_by = lambda index: self._draft_by(index, params, view, sampler)
        made = {index: draft_by(index)(draft[1][index]) for index in self.look_ups}
        bound = jnp.stack([self._bound(index, made, view) for index in range(len(self.members))], axis=1)
        chosen = self.best(draft[0], bound)
        for index in {*range(len(self.members))} - {*made}:
            needed, state = jnp.any(view.live & (chosen == index)), draft[1][index]
            skips = self.members[index].skips
            made[index] = proposed(needed, draft_by(index), state, view) if skips else draft_by(index)(state)
        trees, states = zip(*(made[index] for index in range(len(self.members))), strict=True)
        seen = dataclasses.replace(draft[0], chosen=chosen, watched=self.kept(draft[0].watched, trees))
        return Proposal(self._taken(trees, chosen), (seen, states))

    def _draft_by(self, index: int, params, view, sampler):
        """From a member's state to its tree and its new state."""
        member, own = self.members[index], _own(params, index)

        def draft_by(state):
            made = member.propose(own, member.catch_up(own, state, view), view, sampler)
            return made.tree, made.draft

        return draft_by

    def _bound(self, index: int, made: dict[int, tuple[Tree, Any]], view) -> Array:
        """The most tokens that a step with a member can give `[B]`, as far as its tree is made and says so."""
        if not self.bounded[index]:
            return jnp.full(view.length.shape, jnp.inf)
        tree = made[index][0]
        return 1.0 + jnp.where(tree.valid, tree.depth, 0).max(axis=1)

    def observe(self, params, draft, proposal, output, verdict):
        states = tuple(
            member.observe(_own(params, index), state, dataclasses.replace(proposal, draft=state), output, verdict)
            for index, (member, state) in enumerate(zip(self.members, draft[1], strict=True))
        )
        seen, live = draft[0], verdict.committed > 0
        known = (jnp.arange(len(self.members))[None] == seen.chosen[:, None]) & live[:, None]
        given = jnp.broadcast_to(1 + verdict.accepted[:, None], known.shape)
        if seen.watched is not None:
            watched, tokens, settled = followed(seen.watched, verdict.emitted, verdict.committed)
            seen, own = dataclasses.replace(seen, watched=watched), jnp.asarray(self.look_ups)
            given, known = given.at[:, own].set(tokens), known.at[:, own].set(settled)
        return self.learnt(seen, given, known, live), states

    def best(self, seen: Evidence, bound: Array) -> Array:
        """The member that each row takes, `[B]` int32; of equals the first.

        Args:
          seen: the evidence.
          bound: `[B, M]` float32, the most tokens that the step can give with each member.
        """
        few = jnp.float32(1e-6)  # in place of no steps at all
        tokens, tried = seen.tokens, seen.steps
        mean = tokens / jnp.maximum(tried, few)
        if seen.all_steps is not None and seen.all_tokens is not None:
            every = seen.all_steps[None]
            others = self.pool * (every > 0)
            mean = tokens + others * seen.all_tokens[None] / jnp.maximum(every, few)
            mean, tried = mean / jnp.maximum(tried + others, few), tried + every
        unknown = jnp.sqrt(jnp.log1p(tried.sum(axis=1, keepdims=True)) / jnp.maximum(tried, few))
        index = jnp.minimum(jnp.where(tried > 0, mean + self.explore * unknown, jnp.inf), bound)
        return jnp.argmax(index / jnp.asarray(self.prices, jnp.float32)[None], axis=1).astype(jnp.int32)

    def kept(self, watched: Watched | None, trees: Sequence[Tree]) -> Watched | None:
        """What is watched from this step on: look-ups' trees of all members' `trees`, where no earlier one is followed
        still.
        """
        if watched is None:
            return None
        nodes = watched.tokens.shape[2]
        fields = zip(*(_padded(trees[index], nodes) for index in self.look_ups), strict=True)
        tokens, parents, depths, valid = (jnp.stack(arrays, axis=1) for arrays in fields)
        new = Watched(jnp.where(valid, tokens, -1), parents, depths, depths == 0, watched.age)
        fresh = watched.age == 0
        return jax.tree.map(
            lambda old, new: jnp.where(fresh.reshape(fresh.shape + (1,) * (old.ndim - 2)), new, old), watched, new
        )

    def learnt(self, seen: Evidence, given: Array, known: Array, live: Array) -> Evidence:
        """The evidence after one more step.

        Args:
          seen: before it.
          given: `[B, M]` int32, the tokens of a step with each member.
          known: `[B, M]` bool, of which members that is known.
          live: `[B]` bool; other rows stay as they are.
        """
        steps = known.astype(jnp.float32)
        tokens = jnp.where(known, given, 0.0)
        kept = jnp.where(live, self.decay, 1.0)[:, None]
        fade = FADE ** live.sum()
        shared = lambda old, new: None if old is None else fade * old + new.sum(axis=0)
        return dataclasses.replace(
            seen,
            tokens=kept * seen.tokens + tokens,
            steps=kept * seen.steps + steps,
            all_tokens=shared(seen.all_tokens, tokens),
            all_steps=shared(seen.all_steps, steps),
        )

    def _taken(self, trees: Sequence[Tree], chosen: Array) -> Tree:
        """Each row's tree of the member that it takes, in as many nodes as the largest has."""
        topology = Topology.chain(self.nodes - 1) if self.is_chain else None
        fields = [_padded(tree, self.nodes) for tree in trees]
        pick = lambda *arrays: _picked(arrays, chosen)
        tokens, parent, depth, valid = (pick(*arrays) for arrays in zip(*fields, strict=True))
        if topology is not None:
            parent = jnp.broadcast_to(jnp.asarray(topology.parents, jnp.int32), parent.shape)
            depth = jnp.broadcast_to(jnp.asarray(topology.depths, jnp.int32), depth.shape)
        dists = None
        if self.children in DRAWN and any(tree.log_q is not None for tree in trees):
            size = next(tree.log_q.shape[2] for tree in trees if tree.log_q is not None)
            dists = pick(*(self._dists(tree, size) for tree in trees))
        return Tree(tokens, parent, depth, valid, dists, self.depth, self.children, topology)

    def _dists(self, tree: Tree, size: int) -> Array:
        """The distributions that children were drawn from, `[B, N, V]`; those of copied chains are certain of their tokens."""
        dists = tree.log_q
        if dists is None:
            below = jnp.pad(tree.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
            dists = jnp.where(jnp.arange(size)[None, None] == below[:, :, None], 0.0, -jnp.inf)
        return jnp.pad(dists, ((0, 0), (0, self.nodes - tree.nodes), (0, 0)), constant_values=-jnp.inf)

    def _each(self, method: str, params, states, *args):
        """A method of every member, with its own parameters and state, if there are states."""
        found = []
        for index, member in enumerate(self.members):
            own = () if states is None else (states[index],)
            found.append(getattr(member, method)(_own(params, index), *own, *args))
        return tuple(found)


def followed(watched: Watched, emitted: Array, committed: Array) -> tuple[Watched, Array, Array]:
    """What is watched after the text went on, and what that settled.

    Args:
      watched: before.
      emitted: `[B, D + 1]` int32, each row's new tokens, -1 after the last.
      committed: `[B]` int32, their number; 0 in rows that have ended.

    Returns:
      The trees, some of them with age 0; the tokens that a step with each would have given `[B, M]` int32; and where that is
      known since now `[B, M]` bool. It never is of a tree without nodes.
    """

    def deeper(turn, reached):
        token = jax.lax.dynamic_index_in_dim(emitted, turn, axis=1)[:, None]
        above = jnp.take_along_axis(reached, jnp.maximum(watched.parents, 0), axis=2)
        here = watched.depths == watched.age[:, :, None] + 1 + turn
        return reached | (above & here & (watched.tokens == token) & (token >= 0))

    reached = jax.lax.fori_loop(0, emitted.shape[1], deeper, watched.reached)
    deepest, age = jnp.where(reached, watched.depths, 0).max(axis=2), watched.age + committed[:, None]
    follows = deepest >= age
    settled = ~follows & (committed > 0)[:, None] & jnp.any(watched.tokens[:, :, 1:] >= 0, axis=2)
    return dataclasses.replace(watched, reached=reached, age=jnp.where(follows, age, 0)), 1 + deepest, settled


def _padded(tree: Tree, nodes: int) -> tuple[Array, ...]:
    """A tree's tokens, parents, depths and valid nodes, in so many nodes."""
    more = ((0, 0), (0, nodes - tree.nodes))
    values = (tree.tokens, -1), (tree.parent, 0), (tree.depth, 1), (tree.valid, False)
    return tuple(jnp.pad(array, more, constant_values=value) for array, value in values)


def _own(params, index):
    """The parameters as member `index` gets them."""
    draft = params["draft"]
    return {**params, "draft": None if draft is None else draft[index]}


def _all_of(wants) -> Wants:
    found = Wants()
    for one in wants:
        found |= one
    return found


def _picked(arrays, chosen: Array) -> Array:
    """For each row its entry in the array that it takes."""
    found = arrays[0]
    for index, array in enumerate(arrays[1:], start=1):
        found = jnp.where((chosen == index).reshape(-1, *(1,) * (array.ndim - 1)), array, found)
    return found
