"""A drafter on devices of its own: a step is several programs, which exchange tokens, and the meshes work at the same time.

In the shape descriptions `B` denotes rows, `R` inserted rows, `N` tree nodes, `D` the deepest node, `L` the text buffer.
"""

import collections
import dataclasses
import functools
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.about import abouts
from specjax.draft.ahead import Ahead
from specjax.draft.base import Chunk, Drafter, Proposal, of_inner
from specjax.draft.none import NoDrafter
from specjax.lm import LM, BaseLM, Block, Output, Partial, Wants, dtype_of
from specjax.pretty import Pretty
from specjax.prompts import Prompts
from specjax.settings import settled
from specjax.sharding.ambient import on_mesh, under
from specjax.sharding.rules import constrain
from specjax.speculative import Speculative, StepInfo, write
from specjax.state import DecodeState, Finish
from specjax.tree import Tree
from specjax.verify import Verdict

Array = jax.Array
PyTree = Any

BEHIND = 2
"""How many steps the host is ahead of the devices when it asks whether rows still run, so that it never waits for a step
that it has just started. As many steps too many change nothing: ended rows commit no token."""


@jax.tree_util.register_pytree_node_class
class Elsewhere:
    """Stands for the target's cache and delta on a mesh without the target. Reading it is an error."""

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError("it reads its target's cache")

    __getattr__ = __getitem__ = __iter__ = __len__ = _refuse


@dataclasses.dataclass(frozen=True)
class Absent(BaseLM):
    """Stands for the target on a mesh without it. Its outputs over a prompt are handed over.

    Attributes:
      lm: the target.
      handed: while prompts are read, its output over all of them, `[R, L, ...]` each.
    """

    lm: LM
    handed: Any = None

    @property
    def vocab_size(self) -> int:
        return self.lm.vocab_size

    def init_cache(self, batch, capacity, dtype=None):
        return jnp.zeros((batch, 0), dtype)

    def commit(self, cache, delta, src, dst, counts=None):
        return cache

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, block.positions[0, 0], block.tokens.shape[1], axis=1)
        return dataclasses.replace(jax.tree.map(take, self.handed), delta=Elsewhere())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen(Pretty):
    """What the drafter hears of a step, beside its tokens.

    Attributes:
      output: what it wants of the target's output.
      verdict: the step's.
    """

    output: Output
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Relay(Drafter):
    """Stands for the drafter on the target's mesh: it proposes what came from there, which is `params["draft"]`, and keeps
    what the drafter wants to see.

    Attributes:
      drafter: the drafter.
      target: the target.
      collects: whether it collects the target's output over prompts, `[R, L, ...]` each, as its state.
    """

    drafter: Drafter
    target: LM
    collects: bool = False

    nodes = of_inner("nodes")
    depth = of_inner("depth")
    is_chain = of_inner("is_chain")
    children = of_inner("children")
    alone = of_inner("alone")
    wants = of_inner("wants")
    prefill_wants = of_inner("prefill_wants")
    rungs = of_inner("rungs")
    weighs_rungs = of_inner("weighs_rungs")

    def init(self, params, batch, capacity):
        if not self.collects:
            return ()
        read = lambda weights, block: self.target(weights, block, None, wants=self.prefill_wants)
        shapes = dataclasses.replace(jax.eval_shape(read, params["target"], _block(batch, capacity)), delta=None)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def prefill(self, params, draft, chunk, output):
        if not self.collects:
            return draft
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, chunk.block.positions[0, 0], axis=1)
        return jax.tree.map(put, draft, dataclasses.replace(output, delta=None))

    def propose(self, params, draft, view, sampler):
        tree, partial = params["draft"]
        return Proposal(tree, (), partial=partial)

    def observe(self, params, draft, proposal, output, verdict):
        if not observes(self.drafter):
            return ()
        wants = self.wants
        own = {name: getattr(output, name) for name in ("logits", "topk", "draw", "hidden", "final")}
        kept = {name: value for name, value in own.items() if getattr(wants, name)}
        if "hidden" in kept:
            kept["hidden"] = {layer: output.hidden[layer] for layer in wants.hidden}
        return Seen(Output(Elsewhere(), **kept), verdict)


def _block(batch: int, width: int) -> Block:
    ids = jnp.zeros((batch, width), jnp.int32)
    return Block(ids, ids, jnp.zeros((batch,), jnp.int32))


def observes(drafter: Drafter) -> bool:
    """Static: whether a drafter learns from the target's output."""
    return type(drafter).observe is not Drafter.observe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Told(Pretty):
    """What a step sends to the drafter's mesh.

    Attributes:
      emitted: `[B, D + 1]` int32, the step's tokens.
      length: `[B]` int32, after the step.
      finish: `[B]` int32.
      limit: `[B]` int32.
      carried: see `DecodeState`.
      seen: a `Seen`, or nothing for a drafter that does not learn from it.
    """

    emitted: Array
    length: Array
    finish: Array
    limit: Array
    carried: dict[str, Any]
    seen: Any


@dataclasses.dataclass(frozen=True)
class Drafting(Speculative):
    """The part of a decoder on the drafter's mesh. Its rows have no cache of the target."""

    def prefill(self, params, state, prompts, prefix=None):
        """See `Decoder.prefill`; `params["handed"]` is the target's output over the prompts."""
        here = dataclasses.replace(self, target=Absent(self.target, params["handed"]))
        return Speculative.prefill(here, params, state, prompts)

    def _begun(self, state):
        view, sampler = super()._begun(state)
        return dataclasses.replace(view, cache=Elsewhere()), dataclasses.replace(sampler, drafting=True)

    @settled
    @on_mesh
    def drafted(self, params: PyTree, state: DecodeState) -> tuple[DecodeState, Proposal]:
        """The rows after the drafter has proposed, and what it proposes."""
        proposal = self.drafter.propose(params, state.draft, *self._begun(state))
        state = dataclasses.replace(state, draft=proposal.draft)
        return self._constrain(state), dataclasses.replace(proposal, draft=())

    @settled
    @on_mesh
    def known(self, params: PyTree, state: DecodeState) -> Tree:
        """What a drafter that drafts ahead proposes: it was drafted in the step before."""
        return cast(Ahead, self.drafter).known(params, state.draft, *self._begun(state))

    @settled
    @on_mesh
    def ahead(self, params: PyTree, state: DecodeState, tree: Tree, first: Array | None) -> DecodeState:
        """The rows after such a drafter has drafted for the next step."""
        proposal = cast(Ahead, self.drafter).ahead(params, state.draft, *self._begun(state), tree, first)
        return self._constrain(dataclasses.replace(state, draft=proposal.draft))

    @settled
    @on_mesh
    def followed(self, params: PyTree, state: DecodeState, proposal: Proposal, told: Told) -> DecodeState:
        """The rows after a step's tokens came."""
        draft = state.draft
        if told.seen != ():
            proposal = dataclasses.replace(proposal, draft=draft)
            draft = self.drafter.observe(params, draft, proposal, told.seen.output, told.seen.verdict)
        tokens = write(state.tokens, told.emitted, state.length)
        own = {name: getattr(told, name) for name in ("length", "finish", "limit", "carried")}
        return self._constrain(dataclasses.replace(state, tokens=tokens, draft=draft, **own))


@dataclasses.dataclass(frozen=True)
class Judging(Speculative):
    """The part of a decoder on the target's mesh. Its drafter is a `Relay`."""

    @settled
    @on_mesh
    def guessed(self, params: PyTree, state: DecodeState, tree: Tree) -> tuple[Array, Partial]:
        """The guesses of the target's first layers, and the head start that these are for the others."""
        view, sampler = self._begun(state)
        drafter: Any = cast(Relay, self.drafter).drafter
        sampler = dataclasses.replace(sampler, drafting=True)
        return drafter.guesses(params, tree, view, sampler, drafter.points_of(tree), None)

    def judged(self, params: PyTree, state: DecodeState) -> tuple[DecodeState, StepInfo, Told, Array]:
        """A step, its record, what the other mesh hears of it, and how many rows go on, `[]` int32."""
        state, info = self.step(params, state)
        told = Told(info.verdict.emitted, state.length, state.finish, state.limit, state.carried, state.draft)
        return dataclasses.replace(state, draft=()), info, told, jnp.sum(~state.done)

    @settled
    def entered(self, params: PyTree, state: DecodeState, rows: Array, prompts: Prompts) -> tuple[DecodeState, Any]:
        """The state with new prompts, and the target's output over them, for the drafter."""
        count, collects = prompts.tokens.shape[0], self.drafter.prefill_wants != Wants()
        relay = dataclasses.replace(cast(Relay, self.drafter), collects=collects)
        reader = dataclasses.replace(self, drafter=relay)
        few = reader.empty(params, count, state.tokens.shape[1], dtype_of(state.cache), state.eos.shape[1])
        with under(self.mesh):
            few = reader.prefill(params, decoding.formed(reader, few, prompts.sampling.form), prompts)
            handed = few.draft if collects else Output(None)
            few = dataclasses.replace(few, draft=())
            axes = self.axes(state)
            return constrain(self.mesh, axes, state.place(rows, few, axes)), handed


@dataclasses.dataclass(frozen=True)
class Pipelined(Speculative):
    """A decoder whose drafter has a mesh of its own. Texts are those of the same decoder on one mesh.

    The state is a `DecodeState` on the target's mesh, whose `draft` is the rows on the drafter's mesh. `params` has
    `beside` too: what the drafter reads of the target's parameters. No method may be part of a caller's `jax.jit`, since
    a program belongs to one mesh: the functions of `specjax.decoder` call several of them in turn, and wait for none.

    - A drafter that drafts ahead (`pearl`, `saguaro`, `mirror_sd`) hands over what it drafted in the step before. Then the
      target reads it, while the drafter drafts for the next step. `mirror_sd` waits for the target's first layers.
    - Any other drafter and the target take turns. That is for two kinds of devices, such as a target in a host's memory.

    Attributes:
      draft_mesh: the drafter's mesh, which shares no device with `mesh`.
    """

    draft_mesh: jax.sharding.Mesh | None = None

    hosted = True
    reads_prefix = False

    @functools.cached_property
    def judging(self) -> Judging:
        """The part on the target's mesh."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(Speculative)}
        return Judging(**own | {"drafter": Relay(self.drafter, self.target)})

    @functools.cached_property
    def drafting(self) -> Drafting:
        """The part on the drafter's mesh."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(Speculative)}
        return Drafting(**own | {"target": Absent(self.target), "mesh": self.draft_mesh, "logprobs": False})

    @property
    def needs(self):
        return (*super().needs, "beside")

    def axes(self, state: DecodeState) -> DecodeState:
        """See `Decoder.axes`."""
        axes = self.judging.axes(dataclasses.replace(state, draft=()))
        return dataclasses.replace(axes, draft=self.drafting.axes(state.draft))

    def _split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters on the target's mesh and on the drafter's."""
        judging = {name: params[name] for name in ("target", "verify") if name in params}
        return judging, {"target": params["beside"], "draft": params.get("draft")}

    def hosted_empty(self, params, batch, capacity, cache_dtype=None, eos_width=1, form=decoding.USUAL):
        """See `Decoder.empty`."""
        judging, drafting = self._split(params)
        more = batch, capacity, cache_dtype, eos_width, form
        state = decoding.empty(self.judging, judging | {"draft": None}, *more)
        cache_dtype = cache_dtype or dtype_of(params["target"])
        return dataclasses.replace(
            state, draft=decoding.empty(self.drafting, drafting, batch, capacity, cache_dtype, *more[3:])
        )

    def hosted_insert(self, params, state, rows, prompts, prefix=None):
        """See `Decoder.insert`."""
        judging, drafting = self._split(params)
        own = _on(self.mesh, (rows, prompts))
        side, state = state.draft, dataclasses.replace(state, draft=())
        state, handed = _entered(self.judging, judging | {"draft": None}, state, *own)
        drafting["handed"] = _on(self.draft_mesh, handed)
        there = _on(self.draft_mesh, (rows, prompts))
        side = decoding.insert_program(self.drafting, drafting, side, *there)
        return dataclasses.replace(state, draft=side)

    def hosted_step(self, params, state):
        """See `Decoder.step`."""
        return self._step(params, state)[:2]

    def hosted_run(self, params, state, max_steps, min_live):
        """See `specjax.decoder.run`. After `min_live` rows are left it may make a few steps more."""
        least = max(int(min_live), 1)
        if not int(max_steps):
            return self._compiled(params, state)
        counts = collections.deque([jnp.sum(~state.done)])
        for _ in range(int(max_steps)):
            if len(counts) > BEHIND and int(counts.popleft()) < least:
                return state
            state, _, count = self._step(params, state)
            counts.append(count)
        return state

    def _compiled(self, params, state):
        """The state after a step in which no row took part, so that the programs are there."""
        finish = np.asarray(state.finish)
        held = dataclasses.replace(
            state, finish=jax.device_put(np.full_like(finish, Finish.LENGTH), state.finish.sharding)
        )
        after, _, _ = self._step(params, held)
        side = dataclasses.replace(after.draft, finish=jax.device_put(finish, after.draft.finish.sharding))
        return dataclasses.replace(after, finish=jax.device_put(finish, after.finish.sharding), draft=side)

    def _step(self, params, state):
        judging, drafting = self._split(params)
        side, state = state.draft, dataclasses.replace(state, draft=())
        if isinstance(self.drafter, Ahead):
            tree = _known(self.drafting, drafting, side)
            there, first, partial = _on(self.mesh, tree), None, None
            if self.drafter.target_guesses:
                first, partial = _guessed(self.judging, judging, state, there)
                first = _on(self.draft_mesh, first)
            side, proposal = _ahead(self.drafting, drafting, side, tree, first), Proposal(tree, ())
        else:
            side, proposal = _drafted(self.drafting, drafting, side)
            there, partial = _on(self.mesh, proposal.tree), None
        state, info, told, count = _judged(self.judging, judging | {"draft": (there, partial)}, state)
        side = _followed(self.drafting, drafting, side, proposal, _on(self.draft_mesh, told))
        return dataclasses.replace(state, draft=side), info, count


def _on(mesh: Any, tree: PyTree) -> PyTree:
    """A copy on every device of a mesh."""
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


_entered = jax.jit(Judging.entered, static_argnums=0, donate_argnums=2)
_guessed = jax.jit(Judging.guessed, static_argnums=0)
_judged = jax.jit(Judging.judged, static_argnums=0, donate_argnums=2)
_known = jax.jit(Drafting.known, static_argnums=0)
_ahead = jax.jit(Drafting.ahead, static_argnums=0, donate_argnums=2)
_drafted = jax.jit(Drafting.drafted, static_argnums=0, donate_argnums=2)
_followed = jax.jit(Drafting.followed, static_argnums=0, donate_argnums=2)


def pipelined(decoder: Speculative, params: PyTree, draft_mesh: jax.sharding.Mesh) -> tuple[Pipelined, PyTree]:
    """The decoder with its drafter on a mesh of its own, and the parameters on both.

    Args:
      decoder: with a mesh.
      params: its parameters.
      draft_mesh: shares no device with that mesh.

    Raises:
      ValueError: for a decoder without a mesh, with a shared device or without a drafter; for a target with an encoder; and
        for a drafter that reads its target's cache, or gives it more than a tree.
    """
    name = next((about.name for about in abouts(type(decoder.drafter))), type(decoder.drafter).__name__)
    if decoder.mesh is None or {*decoder.mesh.devices.flat} & {*draft_mesh.devices.flat}:
        raise ValueError("a drafter of its own mesh needs a decoder on another one: give mesh and draft_mesh")
    if isinstance(decoder.drafter, NoDrafter):
        raise ValueError("there is no drafter for a mesh of its own: name one, or leave the draft mesh out")
    if decoder.encodes:
        raise ValueError("a target with an encoder keeps its drafter on its own mesh: leave the draft mesh out")
    early = isinstance(decoder.drafter, Ahead)
    if not (decoder.drafter.plain_tree or early):
        raise ValueError(_refusal(name, "it gives its target more than a tree"))
    own = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(Speculative)}
    made = Pipelined(**own, draft_mesh=draft_mesh)
    try:
        beside = _beside(made, params)
    except ValueError as error:
        raise ValueError(_refusal(name, str(error))) from error
    drafter = made.drafter.param_shardings(draft_mesh, params["draft"]) if params.get("draft") is not None else None
    moved = params if drafter is None else params | {"draft": jax.device_put(params["draft"], drafter)}
    return made, {**moved, "beside": _on(draft_mesh, beside)}


def _refusal(name: str, why: str) -> str:
    return (
        f"the drafter {name} cannot have a mesh of its own, since {why}: choose one with a model or a head, such as pearl, "
        "saguaro, mirror_sd, draft or eagle3, or leave the draft mesh out"
    )


def _beside(made: Pipelined, params: PyTree) -> PyTree:
    """The target's parameters, with None for every array that the drafter does not read.

    Raises:
      ValueError: if it reads the target's cache.
    """
    used = [False] * len(jax.tree.leaves(params["target"]))
    for traced in _traces(made, params):
        for i, var in enumerate(traced.jaxpr.invars[: len(used)]):
            used[i] |= any(var is read for eqn in traced.jaxpr.eqns for read in eqn.invars)
    leaves, tree = jax.tree.flatten(params["target"])
    return jax.tree.unflatten(tree, [leaf if has else None for leaf, has in zip(leaves, used, strict=True)])


def _traces(made: Pipelined, params: PyTree) -> list[Any]:
    """The drafter's programs as they are traced, whose first inputs are the target's parameters."""
    judging, drafting = made.judging, dataclasses.replace(made.drafting, mesh=None)
    own = lambda target: {"target": target, "draft": params.get("draft")}
    both = lambda target: own(target) | {name: params[name] for name in ("verify",) if name in params}
    state = jax.eval_shape(
        lambda target: dataclasses.replace(judging.empty(both(target), 1, 512), draft=()), params["target"]
    )
    make = lambda target: drafting.empty(own(target), 1, 512, dtype_of(target))
    found, side = [jax.make_jaxpr(make)(params["target"])], jax.eval_shape(make, params["target"])
    block = jax.eval_shape(lambda: _block(1, 16))
    chunk = jax.eval_shape(lambda block: Chunk(block, block.tokens > 0, block.tokens), block)
    read = lambda target, block: dataclasses.replace(
        made.target(target, block, None, wants=made.drafter.prefill_wants), delta=Elsewhere()
    )
    output = jax.eval_shape(read, params["target"], block)
    prefill = lambda target, side, *given: made.drafter.prefill(own(target), side.draft, *given)
    found.append(jax.make_jaxpr(prefill)(params["target"], side, chunk, output))
    draft = lambda target, side: drafting.drafted(own(target), side)
    if isinstance(made.drafter, Ahead):
        tree = jax.eval_shape(lambda target, side: drafting.known(own(target), side), params["target"], side)
        first = None
        if made.drafter.target_guesses:
            first = jax.eval_shape(
                lambda *given: judging.guessed(both(given[0]), *given[1:])[0], params["target"], state, tree
            )
        ahead = lambda target, *given: drafting.ahead(own(target), *given)
        found.append(jax.make_jaxpr(ahead)(params["target"], side, tree, first))
        proposal = Proposal(tree, ())
    else:
        found.append(jax.make_jaxpr(draft)(params["target"], side))
        side, proposal = jax.eval_shape(draft, params["target"], side)
    judge = lambda target, *given: judging.judged(both(target) | {"draft": (given[0], None)}, given[1])
    told = jax.eval_shape(judge, params["target"], proposal.tree, state)[2]
    follow = lambda target, *given: drafting.followed(own(target), *given)
    found.append(jax.make_jaxpr(follow)(params["target"], side, proposal, told))
    return found
