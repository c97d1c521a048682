"""S2D: a draft model whose first layers draft where they are sure, and more of them elsewhere (arXiv:2407.01955)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, View
from specjax.draft.model import ModelDraft, ModelDrafter
from specjax.draft.s2d.exits import Exits, Slots, check_exits, usual_exits
from specjax.draft.trim import TrimmedLM
from specjax.lm import Block

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueuedDraft(ModelDraft):
    """The state of the draft model: a cache, and a queue of later tokens that have passed only the first segment.

    Slot s of the queue holds position `length + s`.

    Attributes:
      cache: the draft LM's cache, made of committed tokens that have passed all layers.
      length: `[B]` int32, tokens in the cache.
      count: `[B]` int32, tokens in the queue.
      h: `[B, Q, R]`, their residual stream after the first exit.
      delta: what the first segment computed for the cache, `[B, Q, ...]`.
    """

    count: Any
    h: Any
    delta: Any

    @property
    def read(self) -> Array:
        """`[B]`, all tokens that were read."""
        return self.length + self.count


@dataclasses.dataclass(frozen=True)
class S2D(ModelDrafter):
    """`ModelDrafter` with a model that may stop at several depths, its exits, each under the model's own norm and head.

    A level of the tree leaves at the first exit whose largest probability, over all of the level's nodes, is above the
    exit's threshold. So a chain goes deeper token by token, and the frontier of a tree as a whole. A row's exit depends
    on no other row. Deeper layers run if any row needs them, as one scalar branch. Tokens that left early then pass
    them too, from their residual streams: drafted ones, and committed ones in a queue.

    The queue moves to the cache in a step whose first level passes all layers, or that finds it nearly full. A later level
    that goes deeper passes the queue too, and does not keep that: only the first level's work is known when a tree is
    done. The authors have a queue at each exit; this one is at the first, and passes are as wide as it is in any case.

    Attributes:
      exits: ascending layer counts, the last of which is the whole model. Empty: half of the layers, three quarters and
        all.
      thresholds: a probability for each exit but the last, which every level may leave at; one number is for all. The
        largest probability must be above it, so that a threshold of 1 is the whole model.
      queue: Q, at least D + 1.
    """

    about = About(
        "s2d",
        "a small model that drafts with its first layers where they are sure",
        "arXiv:2407.01955",
        expander="chain",
        loads="sorted_draft",
    )
    tiles = True

    exits: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = (0.5,)
    queue: int = 16

    hidden = None  # pyrefly: ignore[bad-override]
    """Distributions come from features of several depths, so no rule can read them."""

    def __post_init__(self):
        super().__post_init__()
        if not all(0 <= bound <= 1 for bound in self.thresholds) or list(self.exits) != sorted({*self.exits}):
            raise ValueError(
                f"s2d needs ascending exits and thresholds in [0, 1], got {self.exits} and {self.thresholds}"
            )
        self._check_queue(self.depth)

    def _check_queue(self, depth: int) -> None:
        """Raises ValueError if a step may commit more tokens than the queue holds."""
        if self.queue <= depth:
            raise ValueError(
                f"s2d: a step commits up to {depth + 1} tokens and the queue holds {self.queue}: choose queue={depth + 1} "
                "or more"
            )

    def bind(self, target):
        bound = super().bind(target)
        exits = self.exits or usual_exits(self.lm.num_layers)
        check_exits(exits, self.lm.num_layers)
        if len(self.thresholds) not in (1, len(exits) - 1):
            raise ValueError(
                f"s2d: {len(exits)} exits need {len(exits) - 1} thresholds, since every token may leave at the last, or "
                f"one for all, not {len(self.thresholds)}"
            )
        return dataclasses.replace(bound, exits=exits)

    def _exits(self, params: Any, cache: Any, live: Any) -> Exits:
        many = self.thresholds if len(self.thresholds) > 1 else self.thresholds * (len(self.exits) - 1)
        return Exits(self.lm, params["draft"], cache, self.exits, many, live)

    def init(self, params, batch, capacity):
        # a commit writes the whole queue, of which only the first tokens may be real
        model = super().init(params, batch, capacity + self.queue)
        slots = jnp.zeros((batch, self.queue), jnp.int32)
        enter = lambda cache: self._exits(params, cache, None).entered(Block(slots, slots, slots[:, 0]), None)
        h, delta = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(enter, model.cache))
        return QueuedDraft(model.cache, model.length, slots[:, 0], h, delta)

    def axes(self, draft):
        model = super().axes(draft)
        rest = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), (draft.count, draft.h, draft.delta))
        return QueuedDraft(model.cache, model.length, *rest)

    def prefill(self, params, draft, chunk, output):
        """All layers read the chunk. It begins where the cache ends, so queued tokens are read again."""
        model = super().prefill(params, ModelDraft(draft.cache, draft.length), chunk, output)
        return dataclasses.replace(draft, cache=model.cache, length=model.length, count=jnp.zeros_like(draft.count))

    def _fed(self, exits: Exits, draft: QueuedDraft, view: View) -> Slots:
        """The queue with what the last step committed, its last token, the root, included."""
        width, places = view.max_depth + 1, jnp.arange(self.queue)
        take = lambda at: jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")
        new = jnp.arange(width)
        at = draft.read[:, None] + new[None]
        before = jnp.broadcast_to((places[None] < draft.count[:, None])[:, None], (len(at), width, self.queue))
        own = jnp.broadcast_to(new[:, None] >= new[None], (len(at), width, width))
        block = Block(take(at), at, draft.length, jnp.concatenate([before, own], axis=2))
        entered = exits.entered(block, draft.delta)
        rows, to = jnp.arange(len(at))[:, None], draft.count[:, None] + new[None]
        put = lambda queue, x: queue.at[rows, to].set(x.astype(queue.dtype), mode="drop", unique_indices=True)
        h, delta = jax.tree.map(put, (draft.h, draft.delta), entered)
        at = draft.length[:, None] + places[None]
        seen = jnp.broadcast_to(places[:, None] >= places[None], (len(at), self.queue, self.queue))
        return Slots(take(at), at, draft.length, seen, (h,), (delta,))

    def propose(self, params, draft, view, sampler):
        self._check_queue(view.max_depth)
        exits = self._exits(params, draft.cache, view.live)
        queue = self._fed(exits, draft, view)
        count = view.length - draft.length
        root = jnp.clip(count - 1, 0, self.queue - 1)[:, None, None]
        full = jnp.any(view.live & (count > self.queue - view.max_depth - 1))
        slots, logits = exits.deepened(queue, lambda h: jnp.take_along_axis(h, root, axis=1), must=full)
        passed = slots.passed[-1] if slots.passed else jnp.array(True)
        real = jnp.arange(self.queue)[None] < count[:, None]

        def grow(slots, level):
            at = view.length[:, None] - 1 + jnp.full(level.tokens.shape, level.depth)
            shape = (*level.tokens.shape, level.visible.shape[2])
            seen = jnp.broadcast_to(real[:, None], (*shape[:2], self.queue))
            visible = jnp.concatenate([seen, jnp.broadcast_to(level.visible, shape)], axis=2)
            slots = exits.more(slots, Block(level.tokens, at, draft.length, visible))
            last = level.tokens.shape[1]
            return exits.deepened(slots, lambda h: h[:, -last:], last, shown=level.tokens >= 0)

        if isinstance(self.lm, TrimmedLM):
            sampler = sampler.restricted(params["draft"]["ids"], self.lm.vocab_size)
        tree = self.expander(view.root, logits[:, 0], grow, slots, sampler, keep_q=view.keep_q)
        # the write depends on the reads, so that the cache is updated in place; see `ModelDrafter.propose`
        after = jnp.where(tree.tokens.min(axis=1) < -1, 0, draft.length)
        delta = jax.tree.map(lambda x: x[:, : self.queue], exits.joined(slots.deltas))
        moved = jnp.where(passed, count, 0)
        cache = self.lm.commit(draft.cache, delta, None, after, moved)
        own = QueuedDraft(cache, draft.length + moved, count - moved, queue.h[0], queue.deltas[0])
        return Proposal(tree, own)
