"""A drafter for the drafter: a draft model whose own decoding is sped up by a cheaper drafter (CS Drafting,
arXiv:2312.11462).

In the shape descriptions `B` denotes rows, `K` the model's tokens, `M` tokens that the cheaper drafter proposes to a pass of
it (at most K - 1), `T` further tokens, `V` the vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Drafter, Proposal, View
from specjax.draft.model import ModelDrafter
from specjax.draft.prompt_lookup import PromptLookup
from specjax.draft.trim import TrimmedLM
from specjax.expand import Chain
from specjax.lm import LM, Block, Wants
from specjax.tree import OfTopology, Topology, Tree

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Drafted:
    """What the draft model has written in this step.

    Attributes:
      tokens: `[B, K + M]` int32, the drafted tokens, then garbage.
      count: `[B]` int32, how many there are.
      past: what the model keeps of them, `[B, K + M, ...]`; of the last one not yet.
      log_q: `[B, K + M, V]` float32, the distribution that each was drawn from; None if nobody asks.
    """

    tokens: Array
    count: Array
    past: PyTree
    log_q: Array | None


@dataclasses.dataclass(frozen=True)
class Cascade(OfTopology, Drafter):
    """A chain of a draft model, which a cheaper drafter drafts for, and more tokens of the cheaper drafter below it.

    Vertical cascade: the cheaper drafter proposes tokens to the draft model. A pass of the model draws its own tokens at
    all these places with each place's noise, and keeps the proposed ones as far as they are these. So the model's tokens
    are exactly those of `draft:length=K`, in fewer passes of the model. The loop of passes ends when every live row has
    its K tokens. Horizontal cascade: after them, where fewer tokens are accepted anyway, the cheaper drafter goes on
    for up to T tokens.

    Ours: the model never keeps a token that it would not have drawn (the paper may, by a lenience), and there are two
    levels. Drawn tokens have the model's distributions as `log_q`; copied ones are certain.

    Attributes:
      lm: the draft model; `params["draft"]` are its parameters.
      by: the cheaper drafter, of chains and without parameters.
      length: K.
      tail: T; 0 for no horizontal cascade.
    """

    about = About(
        "cascade", "a small model, which a look-up drafts for", "arXiv:2312.11462",
        fields=("length", "tail"), loads="model", parts={"by": "prompt_lookup:length=4"},
    )  # fmt: skip
    tiles = True

    lm: LM
    by: Drafter = PromptLookup(length=4)
    length: int = 4
    tail: int = 4

    needs_params = True

    def __post_init__(self):
        if self.length < 1 or self.tail < 0:
            raise ValueError(f"cascade needs length >= 1 and tail >= 0, got length={self.length}, tail={self.tail}")

    @property
    def model(self) -> ModelDrafter:
        """The draft model on its own, whose chain of K tokens is the same."""
        return ModelDrafter(self.lm, Chain(self.length))

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.length + self.tail)

    @property
    def rungs(self) -> tuple[int, ...]:
        return tuple(sorted({self.length + 1, self.nodes}))

    @property
    def children(self):
        return "coupled"

    @property
    def alone(self) -> bool:
        return self.by.alone

    def bind(self, target):
        by = self.by.bind(target)
        faults = {
            "reads slots of its own": not by.plain_tree,
            "grows a tree": not by.is_chain,
            "must draft in every step": not by.skips,
            "has parameters": by.needs_params,
            "learns from the target": by.wants != Wants(),
            "learns from how its own drafts are judged": by.needs_own_verdicts,
        }
        fault = next((fault for fault, found in faults.items() if found), None)
        if fault is not None:
            raise ValueError(
                f"cascade takes a look-up of chains for its draft model, such as prompt_lookup; {type(by).__name__} {fault}"
            )
        if isinstance(self.lm, TrimmedLM):
            raise ValueError("cascade takes a draft model with all tokens: this one's head is trimmed")
        self.model.bind(target)
        return dataclasses.replace(self, by=by)

    def init(self, params, batch, capacity):
        return self.model.init(params, batch, capacity), self.by.init(_bare(params), batch, capacity)

    def axes(self, draft):
        return self.model.axes(draft[0]), self.by.axes(draft[1])

    def param_shardings(self, mesh, params):
        return self.model.param_shardings(mesh, params)

    def encode(self, params, draft, source, tokens):
        by = self.by.encode(_bare(params), draft[1], source, tokens)
        return self.model.encode(params, draft[0], source, tokens), by

    def prefill(self, params, draft, chunk, output):
        by = self.by.prefill(_bare(params), draft[1], chunk, output)
        return self.model.prefill(params, draft[0], chunk, output), by

    def catch_up(self, params, draft, view):
        by = self.by.catch_up(_bare(params), draft[1], view)
        return self.model.catch_up(params, draft[0], view), by

    def propose(self, params, draft, view, sampler):
        own, logits, _ = self.model.begun(params, draft[0], view)
        width = min(self.by.depth, self.length - 1)  # no more of what is proposed to a pass can be kept
        room, rows = self.length + width, jnp.arange(view.root.shape[0])
        chain = lambda drafted: self._by(params, draft[1], view, sampler, drafted)
        first = sampler.draw(logits[:, None], 0)
        tokens = jnp.zeros((len(rows), room), jnp.int32).at[:, :1].set(first)
        log_q = None
        if view.keep_q:
            log_q = jnp.zeros((len(rows), room, logits.shape[1])).at[:, :1].set(sampler.log_probs(logits[:, None]))
        drafted = _Drafted(tokens, jnp.ones((len(rows),), jnp.int32), self._past(params, view, own.cache, room), log_q)
        more = lambda drafted: jnp.any(view.live & (drafted.count < self.length))
        on = lambda drafted: self._on(params, view, sampler, own.cache, drafted, chain(drafted)[:, :width])
        drafted = jax.lax.while_loop(more, on, drafted)
        return Proposal(self._tree(view, drafted, chain), (own, draft[1]))

    def observe(self, params, draft, proposal, output, verdict):
        own = dataclasses.replace(proposal, draft=draft[1])
        return draft[0], self.by.observe(_bare(params), draft[1], own, output, verdict)

    def _by(self, params, state, view: View, sampler, drafted: _Drafted) -> Array:
        """What the cheaper drafter says after the drafted tokens, as many as it can, int32, -1 from its end on."""
        at = jnp.arange(view.tokens.shape[1])[None] - view.length[:, None]
        new = jnp.take_along_axis(drafted.tokens, jnp.clip(at, 0, drafted.tokens.shape[1] - 1), axis=1)
        text = jnp.where((at >= 0) & (at < drafted.count[:, None]), new, view.tokens)
        ahead = dataclasses.replace(view, tokens=text, length=view.length + drafted.count, keep_q=False)
        tree = self.by.propose(_bare(params), state, ahead, sampler).tree
        return jnp.where(tree.valid, tree.tokens, -1)[:, 1:]

    def _block(self, view: View, tokens: Array, count: Array, room: int) -> Block:
        """The last drafted token of `count` `[B]` and those proposed after it; `tokens` is `[B, 1 + M]`."""
        width = tokens.shape[1]
        depth = count[:, None] + jnp.arange(width)[None]
        seen = jnp.broadcast_to((jnp.arange(room)[None] < count[:, None] - 1)[:, None], (len(count), width, room))
        own = jnp.broadcast_to(jnp.tri(width, dtype=bool)[None], (len(count), width, width))
        visible = jnp.concatenate([seen, own], axis=2)
        return Block(tokens, view.length[:, None] - 1 + depth, view.length, visible)

    def _past(self, params, view: View, cache, room: int) -> PyTree:
        """Room for what the model keeps of drafted tokens."""
        tokens = jnp.zeros((view.root.shape[0], 1), jnp.int32)
        one = Block(tokens, view.length[:, None], view.length, jnp.ones((1, 1, 1), bool))
        shape = jax.eval_shape(lambda: self.lm(params["draft"], one, cache, wants=Wants()).delta)
        return jax.tree.map(lambda x: jnp.zeros((x.shape[0], room, *x.shape[2:]), x.dtype), shape)

    def _on(self, params, view: View, sampler, cache, drafted: _Drafted, proposed: Array) -> _Drafted:
        """One more pass of the draft model, over the last drafted token and what is proposed after it."""
        count, room, width = drafted.count, drafted.tokens.shape[1], 1 + proposed.shape[1]
        last = jnp.take_along_axis(drafted.tokens, count[:, None] - 1, axis=1)
        block = self._block(view, jnp.concatenate([last, proposed], axis=1), count, room)
        wants = Wants(logits=True)
        output = self.lm(params["draft"], block, cache, wants=wants, past=drafted.past)
        maybe = _put(drafted.tokens, proposed, count)  # as if all were kept
        depth = count[:, None] + jnp.arange(width)[None]

        def paths():
            before = jnp.arange(room)[None, None] < depth[:, :, None]
            return jnp.where(before, maybe[:, None], -1)

        drawn = sampler.draw(output.logits, depth, paths, room)
        kept = jnp.cumprod((drawn[:, :-1] == proposed) & (proposed >= 0), axis=1).sum(axis=1)
        tokens = _put(drafted.tokens, drawn, count)
        log_q = drafted.log_q
        if log_q is not None:
            log_q = _put(log_q, sampler.log_probs(output.logits, paths), count)
        past = jax.tree.map(lambda old, new: _put(old, new, count - 1), drafted.past, output.delta)
        return _Drafted(tokens, jnp.minimum(count + kept + 1, self.length), past, log_q)

    def _tree(self, view: View, drafted: _Drafted, chain) -> Tree:
        """The model's K tokens, then what the cheaper drafter says after them."""
        tokens = drafted.tokens[:, : self.length]
        more = chain(drafted)[:, : self.tail]
        more = jnp.pad(more, ((0, 0), (0, self.tail - more.shape[1])), constant_values=-1)
        nodes = jnp.concatenate([view.root[:, None], tokens, more], axis=1)
        log_q = drafted.log_q
        if log_q is not None:
            copied = jnp.where(jnp.arange(log_q.shape[2])[None, None] == more[:, :, None], 0.0, -jnp.inf)
            end = jnp.full_like(log_q[:, :1], -jnp.inf)
            log_q = jnp.concatenate([log_q[:, : self.length], copied, end], axis=1)
        return Tree.of(self.topology, nodes, nodes >= 0, log_q=log_q, children=self.children)


def _bare(params):
    """The parameters as the cheaper drafter gets them."""
    return {**params, "draft": None}


def _put(buffer: Array, new: Array, at: Array) -> Array:
    """The buffer `[B, R, ...]` with `new` `[B, F, ...]` in each row's places from `at` `[B]` on, as far as there is room."""
    places = at[:, None] + jnp.arange(new.shape[1])[None]
    return buffer.at[jnp.arange(len(at))[:, None], places].set(new.astype(buffer.dtype), mode="drop")
