"""Of several drafters, each row's step takes the one that has paid best so far: a bandit (BanditSpec, arXiv:2505.15141).

In the shape descriptions `B` denotes rows, `M` members, `N` tree nodes.
"""

import dataclasses
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
class Evidence:
    """What members have given so far.

    Attributes:
      tokens: `[B, M]` float32, tokens of the row's steps with each member, older ones with less weight.
      steps: `[B, M]` float32, the number of these steps, weighted alike.
      all_tokens: `[M]` float32, the same of all rows, ended ones too; they share it. None if each is on its own.
      all_steps: `[M]` float32, or None.
      chosen: `[B]` int32, the member of the current step.
      offered: tokens, parents and depths `[B, M, N]` int32 of what members propose in the current step, tokens -1 where a
        member is not watched. None if none is.
    """

    tokens: Array
    steps: Array
    all_tokens: Array | None
    all_steps: Array | None
    chosen: Array
    offered: tuple[Array, Array, Array] | None = None


@dataclasses.dataclass(frozen=True)
class Switch(Drafter):
    """In every step each row takes the proposal of one of several drafters. The text does not change.

    Member i has been tried in n_i steps of this row and N_i of all rows, with a mean of m_i tokens in the row and M_i
    in all. The row takes the member with the largest

    `((n_i m_i + pool M_i) / (n_i + pool) + explore sqrt(ln(1 + T) / (n_i + N_i))) / cost_i`

    where T is the sum of all n and N. This is UCBSpec's index (BanditSpec, algorithm 2) with counts that fade, as
    text changes (discounted UCB, arXiv:0805.3415). Ours: rows begin with what all rows have seen, because a
    single text is too short to try every member. Nothing is drawn and no clock is read: the choice depends on the
    accepted tokens of earlier steps alone.

    Members without parameters (look-ups) draft in every step and are judged in every step: by how far their trees follow
    the tokens that the row commits, which any member may have proposed. If a tree follows them to their end, one token more is
    counted, which is the least that the step would have given. So what a member can do is known before it is taken.

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
        nodes = lambda value: jnp.full((batch, count, self.nodes), value, jnp.int32)
        offered = (nodes(-1), nodes(0), nodes(0)) if any(self.watched) else None
        seen = Evidence(none(batch, count), none(batch, count), *shared, jnp.zeros((batch,), jnp.int32), offered)
        return seen, self._each("init", params, None, batch, capacity)

    def axes(self, draft):
        row: Any = ("batch", None)
        shared: Any = (None,) if self.pool else None
        offered: Any = (("batch", None, None),) * 3 if any(self.watched) else None
        own = Evidence(row, row, shared, shared, row[:1], offered)
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
        chosen = self.best(draft[0])
        trees, states = [], []
        for index, (member, state) in enumerate(zip(self.members, draft[1], strict=True)):
            own = _own(params, index)

            def draft_by(state, member=member, own=own):
                ready = member.catch_up(own, state, view)
                made = member.propose(own, ready, view, sampler)
                return made.tree, made.draft

            needed = jnp.any(view.live & (chosen == index))
            skips = member.skips and not self.watched[index]
            tree, state = proposed(needed, draft_by, state, view) if skips else draft_by(state)
            trees.append(tree)
            states.append(state)
        seen = dataclasses.replace(draft[0], chosen=chosen, offered=self._offered(trees))
        return Proposal(self._taken(trees, chosen), (seen, tuple(states)))

    def observe(self, params, draft, proposal, output, verdict):
        states = tuple(
            member.observe(_own(params, index), state, dataclasses.replace(proposal, draft=state), output, verdict)
            for index, (member, state) in enumerate(zip(self.members, draft[1], strict=True))
        )
        followed = self.followed(draft[0], verdict.emitted)
        return self.learnt(draft[0], verdict.accepted, verdict.committed > 0, followed), states

    def best(self, seen: Evidence) -> Array:
        """The member that each row takes, `[B]` int32; of equals the first."""
        few = jnp.float32(1e-6)  # in place of no steps at all
        tokens, tried = seen.tokens, seen.steps
        mean = tokens / jnp.maximum(tried, few)
        if seen.all_steps is not None and seen.all_tokens is not None:
            every = seen.all_steps[None]
            others = self.pool * (every > 0)
            mean = tokens + others * seen.all_tokens[None] / jnp.maximum(every, few)
            mean, tried = mean / jnp.maximum(tried + others, few), tried + every
        unknown = jnp.sqrt(jnp.log1p(tried.sum(axis=1, keepdims=True)) / jnp.maximum(tried, few))
        index = (mean + self.explore * unknown) / jnp.asarray(self.prices, jnp.float32)[None]
        untried = jnp.where(tried > 0, index, jnp.inf)
        return jnp.argmax(untried, axis=1).astype(jnp.int32)

    def followed(self, seen: Evidence, emitted: Array) -> Array | None:
        """How many of the tokens that a row's step gave each member's tree has in a path, `[B, M]` int32. None if no
        member is watched.

        Args:
          seen: `offered` has the trees.
          emitted: `[B, D + 1]` int32, -1 after the last token.
        """
        if seen.offered is None:
            return None
        tokens, parents, depths = seen.offered

        def deeper(depth, reached):
            token = jax.lax.dynamic_index_in_dim(emitted, depth - 1, axis=1)[:, None]
            above = jnp.take_along_axis(reached, jnp.maximum(parents, 0), axis=2)
            return reached | (above & (depths == depth) & (tokens == token) & (token >= 0))

        begun = depths == 0
        reached = jax.lax.fori_loop(1, emitted.shape[1] + 1, deeper, begun)
        return jnp.where(reached, depths, 0).max(axis=2)

    def learnt(self, seen: Evidence, accepted: Array, live: Array, followed: Array | None = None) -> Evidence:
        """The evidence after one more step.

        Args:
          seen: before it; `chosen` says what each row took.
          accepted: `[B]` int32, accepted draft tokens.
          live: `[B]` bool; other rows stay as they are.
          followed: `[B, M]` int32 of the watched members, which no row need have taken.
        """
        took = (jnp.arange(len(self.members))[None] == seen.chosen[:, None]) & live[:, None]
        given, known = jnp.broadcast_to(accepted[:, None], took.shape), took
        if followed is not None:
            given, known = jnp.where(took, given, followed), took | (live[:, None] & jnp.asarray(self.watched)[None])
        steps = known.astype(jnp.float32)
        tokens = jnp.where(known, 1.0 + given, 0.0)
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

    def _offered(self, trees: list[Tree]) -> tuple[Array, Array, Array] | None:
        """What `Evidence.offered` is."""
        if not any(self.watched):
            return None
        fields = [self._padded(tree) for tree in trees]
        tokens, parents, depths = (jnp.stack(arrays, axis=1) for arrays in list(zip(*fields, strict=True))[:3])
        return jnp.where(jnp.asarray(self.watched)[None, :, None], tokens, -1), parents, depths

    def _taken(self, trees: list[Tree], chosen: Array) -> Tree:
        """Each row's tree of the member that it takes, in as many nodes as the largest has."""
        topology = Topology.chain(self.nodes - 1) if self.is_chain else None
        fields = [self._padded(tree) for tree in trees]
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

    def _padded(self, tree: Tree) -> tuple[Array, ...]:
        more = ((0, 0), (0, self.nodes - tree.nodes))
        values = (tree.tokens, -1), (tree.parent, 0), (tree.depth, 1), (tree.valid, False)
        return tuple(jnp.pad(array, more, constant_values=value) for array, value in values)

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
