"""DEL: the exit layer and draft length that promise the most tokens for the layers read (arXiv:2504.05598)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft import spine
from specjax.draft.base import Proposal, TreeDrafter
from specjax.expand.early_stop import EarlyStop
from specjax.lm import Partial

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Evidence:
    """How well each of X exits predicts the target: decayed sums over the verified positions, `[B, X]` float32.

    Attributes:
      matched: positions where the exit's own draw was the target's.
      seen: positions.
      sure: confidence of the matches.
      unsure: confidence of the mismatches.
    """

    matched: Any
    seen: Any
    sure: Any
    unsure: Any

    @property
    def rate(self) -> Array:
        """`[B, X]`, the share of matches."""
        return self.matched / self.seen

    @property
    def threshold(self) -> Array:
        """`[B, X]`, midway between the mean confidences of matches and mismatches; 0 before the first mismatch."""
        missed = self.seen - self.matched
        between = (self.sure / jnp.maximum(self.matched, 1e-6) + self.unsure / jnp.maximum(missed, 1e-6)) / 2
        return jnp.where((missed > 1e-3) & (self.matched > 1e-3), between, 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """A proposal's own part of the state, until the verdict is known.

    Attributes:
      evidence: so far.
      shadow: `[B, X, N]` int32, the token that every exit would have drawn at every node; -1 where it was not computed.
      confidence: `[B, X, N]` float32, of these draws.
    """

    evidence: Evidence
    shadow: Array
    confidence: Array


def tokens_per_layer(rate: Array, exits: tuple[int, ...], length: int, layers: int) -> Array:
    """Expected tokens per step over the layers that it reads, `[B, X, length]` for 1 to `length` drafted tokens.

    With d tokens drafted at exit l it is `(1 + a + ... + a^d) / (d l + L)`, where a is the rate `[B, X]`.
    """
    drafted = jnp.arange(1, length + 1)[None, None]
    cost = drafted * jnp.asarray(exits)[None, :, None] + layers
    return (1 + jnp.cumsum(rate[:, :, None] ** drafted, axis=2)) / cost


@dataclasses.dataclass(frozen=True)
class DynamicExit(TreeDrafter):
    """Drafts with an early exit of the target; training-free, for targets whose early layers can be read by the head
    (LayerSkip).

    A step drafts with layers `[0, l)` and the target's own norm and head. Rows choose their own draft length, and vote
    on l by the promise of each exit. Through that vote a row's draft depends on the others (see `Drafter.alone`).

    The draft's work is kept: the chain goes on from l to the last exit, where the target takes over. Every exit's own
    draws at the verified positions are the evidence for later steps, which costs one more read of the head for every
    exit but l.

    Attributes:
      exits: ascending layer counts to choose from; empty: see `every`.
      length: the longest chain.
      decay: the factor by which a step's evidence is multiplied at the next step.
      every: without `exits`, an exit after every so many layers. The paper has 1, all of them. A step's program holds a
        branch for each exit, and reads the head for each. 0 gives a quarter and a half of the target.
      target: filled in by `bind`.
    """

    about = About("del", "the target's first layers, as many as pay", "arXiv:2504.05598", paper="every=1")

    exits: tuple[int, ...] = ()
    length: int = 6
    decay: float = 0.95
    every: int = 0
    target: Any = None

    def __post_init__(self):
        EarlyStop(self.length)
        if not 0 < self.decay <= 1 or list(self.exits) != sorted(set(self.exits)) or self.every < 0:
            raise ValueError(f"del needs ascending exits, every from 0 on and a decay in (0, 1], got {self}")

    @property
    def expander(self) -> EarlyStop:
        return EarlyStop(self.length)

    plain_tree = False

    @property
    def alone(self) -> bool:
        return False

    def bind(self, target):
        layers = target.num_layers
        usual = range(self.every, layers, self.every) if self.every else {max(layers // 4, 1), max(layers // 2, 1)}
        exits = self.exits or tuple(sorted(usual))
        if not exits:
            raise ValueError(f"del: every={self.every} leaves no exit inside a target of {layers} layers")
        if exits[0] < 1 or exits[-1] >= layers:
            raise ValueError(
                f"del: exits {exits} must lie inside a target of {layers} layers: choose 1 to {layers - 1}"
            )
        return dataclasses.replace(self, exits=exits, target=target)

    def init(self, params, batch, capacity):
        one = lambda: jnp.ones((batch, len(self.exits)), jnp.float32)  # starts with trust in every exit
        return Evidence(one(), one(), one(), jnp.zeros_like(one()))

    def propose(self, params, draft, view, sampler):
        promise = tokens_per_layer(draft.rate, self.exits, self.length, self.target.num_layers)
        votes = jnp.where(view.live[:, None], promise.max(axis=2), 0.0).sum(axis=0)
        choice = jnp.argmax(votes)
        mine = jnp.take_along_axis(promise, jnp.full((promise.shape[0], 1, 1), choice), axis=1)[:, 0]
        longest = 1 + jnp.argmax(mine, axis=1)
        threshold = draft.threshold[:, choice]
        branches = [functools.partial(self._chain, i, params["target"], view, sampler) for i in range(len(self.exits))]
        tree, sure, features, below = jax.lax.switch(choice, branches, longest, threshold)
        shadow, confidence = self._shadows(params["target"], choice, tree, sure, features, sampler)
        partial = Partial(features[-1], below, self.exits[-1])
        return Proposal(tree, Pending(draft, shadow, confidence), partial=partial)

    def _chain(self, chosen, weights, view, sampler, longest, threshold):
        """The chain drafted at one exit, its confidences, and features `[X, B, N, E]` and delta up to the last exit."""
        target, slots = self.target, self.nodes

        def climb(h, delta, block, past, lo, exits):
            """Runs `h` from layer `lo` through the exits; returns its value at each of them, and the delta."""
            features = []
            for hi in exits:
                h, part = target.layers(weights, h, lo, hi, block, view.cache, past, below=delta)
                delta = part if delta is None else target.join(delta, part)
                features.append(h)
                lo = hi
            return features, delta

        def enter(block, past):
            earlier = None if past is None else past[1]
            return climb(target.embed(weights, block.tokens), None, block, earlier, 0, self.exits[: chosen + 1])

        def head(entries):
            return target.unembed(weights, target.norm(weights, entries[0][-1]))

        def grow(past, level):
            entries = enter(spine.block(view, level.tokens, [level.depth], slots), past)
            return spine.put(past, entries, level.depth), head(entries)

        def goes_on(depth, confidence, carry):
            return (depth < longest) & (confidence >= threshold)

        first = enter(spine.block(view, view.root[:, None], [0], 0), None)
        tree, past, sure = self.expander.run(
            view.root, head(first)[:, 0], grow, spine.room(first, slots), sampler, keep_q=view.keep_q, goes_on=goes_on
        )
        features, delta = spine.complete(view, tree, past, enter)
        block = Proposal(tree, ()).block(view)
        more, delta = climb(features[-1], delta, block, None, self.exits[chosen], self.exits[chosen + 1 :])
        return tree, sure, jnp.stack([*features, *more]), delta

    def _shadows(self, weights, choice, tree, sure, features, sampler):
        """The draw of every exit at every node, and its confidence, `[B, X, N]` each.

        The chosen exit has already drawn: the drafted tokens. Only at the last one's node has it not.
        """
        count, batch, nodes, width = features.shape
        last = jnp.full((batch, 1), -1, jnp.int32)
        tokens = jnp.concatenate([tree.tokens[:, 1:], last], axis=1)[None]
        confidence = jnp.pad(sure, ((0, 0), (0, 1)))[None]
        if count > 1:  # the exits in cyclic order from the chosen one on, which is left out
            others = jnp.roll(features, -choice, axis=0)[1:].transpose(1, 0, 2, 3).reshape(batch, -1, width)
            logits = self.target.unembed(weights, self.target.norm(weights, others))
            paths = lambda: jnp.tile(tree.path_tokens(), (1, count - 1, 1))
            scores = sampler.scores(logits, jnp.tile(tree.depth, (1, count - 1)), paths, tree.max_depth)
            split = lambda x: x.reshape(batch, count - 1, nodes).swapaxes(0, 1)
            tokens = jnp.concatenate([tokens, split(jnp.argmax(scores, axis=2).astype(jnp.int32))])
            peak = jnp.exp(scores.max(axis=2) - jax.nn.logsumexp(scores, axis=2))
            confidence = jnp.concatenate([confidence, split(peak)])
        back = lambda x: jnp.roll(x, choice, axis=0).swapaxes(0, 1)
        return back(tokens), back(confidence)

    def observe(self, params, draft, proposal, output, verdict):
        """Positions up to the first mismatch count, in rows that committed tokens."""
        tokens = proposal.tree.tokens
        steps = jnp.arange(tokens.shape[1])[None]
        last = verdict.accepted[:, None]
        drawn = jnp.where(steps < last, jnp.roll(tokens, -1, axis=1), verdict.next_token[:, None])
        taken = verdict.committed > 0
        seen = (steps <= last)[:, None] & (draft.shadow >= 0) & taken[:, None, None]
        hit = seen & (draft.shadow == drawn[:, None])
        confidence = jnp.where(seen, draft.confidence, 0.0)  # unverified nodes may hold anything
        decay = jnp.where(taken, self.decay, 1.0)[:, None]
        old = draft.evidence
        return Evidence(
            matched=decay * old.matched + hit.sum(axis=2),
            seen=decay * old.seen + seen.sum(axis=2),
            sure=decay * old.sure + jnp.where(hit, confidence, 0.0).sum(axis=2),
            unsure=decay * old.unsure + jnp.where(hit, 0.0, confidence).sum(axis=2),
        )
