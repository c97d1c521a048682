"""Falcon: EAGLE that drafts a block of tokens in one pass (Gao et al. 2024, arXiv:2412.12639)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.eagle import Eagle
from specjax.draft.head import params_dtype
from specjax.expand import Chain, Expander
from specjax.lm import Block
from specjax.models.kv import commit_kv, init_kv, kv_axes, stack_past

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FalconDraft:
    """The state of a head with blocks of k pairs.

    Attributes:
      cache: the head's own, of committed pairs.
      length: `[B]` int32, committed pairs: one less than the row's tokens.
      outputs: `[B, k, E]`, those of the last k pairs: the distributions of the next k tokens.
      features: `[B, k - 1, E]`, the target's features in the last k - 1 pairs; zeros before a text's first pair.
      tokens: `[B, k - 1]` int32, the tokens in these pairs; 0 before the first.
    """

    cache: Any
    length: Any
    outputs: Any
    features: Any
    tokens: Any


class Grown(NamedTuple):
    """What `grow` carries: P scored nodes, the root first, and N blocks, of which the first is the last one of the text.

    Attributes:
      past: keys and values of the drafted blocks, `[B, (N - 1) k, ...]`; None before the first.
      outputs: `[B, N, k, E]`.
      block: `[B, P]` int32, the block whose outputs are the distributions at and below a node.
      seen: `[B, P, N]` bool, which drafted blocks lie on a node's path.
      recent: `[B, P, k - 1]` int32, the last tokens of a node's path.
      h: `[B, F, E]`, the outputs that the last level's distributions were computed from.
    """

    past: Any
    outputs: Array
    block: Array
    seen: Array
    recent: Array
    h: Array


@dataclasses.dataclass(frozen=True)
class Falcon(Eagle):
    """EAGLE whose pass drafts a block of k tokens: pair i's output is feature i + k, not i + 1.

    The pairs of a block see each other, and all before them (a relaxed causal mask). An LSTM of two layers joins feature
    and embedding. So nodes of depth 1 to k - 1 have the distributions of the root's block, nodes of depth k to 2 k - 1
    those of their ancestor's at depth k, and so on.

    A text's last block always ends with its last pair. Keys and values are those that a pair had when it was committed;
    they do not depend on its block unless the LSTM carries.

    `params["draft"]` is FalconHead's, and optionally `head` and `ids`, as in EAGLE.

    Attributes:
      block: k.
      carries: whether the LSTM goes on from pair to pair of a block. By default it begins empty at every pair, as in the
        authors' code with one row. If it carries, a pair's keys and values depend on where its block began. Then drafts
        depend on whether a text came as a prompt or in steps; its text does not.
    """

    about = About(
        "falcon",
        "EAGLE-1 with two tokens per pass, and an LSTM",
        "arXiv:2412.12639",
        expander="chain:length=4",
        paper="expander=static,tree=20 | 11 4x2 | 7 10 1x2 0x7 1 0x3 1 | 10 0x6 1 0x9 1x4 | 8 1 0x8 1x5 | 4 0x7 1x6 "
        "| 4 0x3 1x6 | 3 0x3 1x6",
        fields=("block", "carries"),
        loads="head",
    )

    expander: Expander = Chain(4)
    block: int = 2
    carries: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.block < 2:
            raise ValueError(f"falcon: a block has at least 2 tokens, got block={self.block}: with 1, choose eagle1")

    @property
    def head(self):
        from specjax.draft.falcon.network import FalconHead

        return FalconHead(self.config, self.block, self.carries)

    @classmethod
    def objective(cls):
        from specjax.draft.falcon.objective import TrainFalcon

        return TrainFalcon

    @classmethod
    def layout(cls):
        from specjax.draft.falcon.published import LAYOUT

        return LAYOUT

    def widened(self, params, k, width):
        """A gate of the LSTM is a vector of the model's width, and is widened like one."""
        from specjax.models.widening import tiled

        gate = lambda linear, i: jax.tree.map(lambda x: jnp.split(x, 4, axis=-1)[i], linear)
        joined = lambda *gates: jnp.concatenate(gates, axis=-1)
        wider = lambda linear: jax.tree.map(joined, *(tiled({"fc": gate(linear, i)}, k, width)["fc"] for i in range(4)))
        cells = {at: {name: wider(linear) for name, linear in cell.items()} for at, cell in params["lstm"].items()}
        others = {name: value for name, value in params.items() if name != "lstm"}
        return {"lstm": cells, **tiled(others, k, width)}

    def init(self, params, batch, capacity):
        dtype, k, size = params_dtype(params["draft"]), self.block, self.feature_size
        zeros = lambda *shape: jnp.zeros((batch, *shape), dtype)
        tokens = jnp.zeros((batch, k - 1), jnp.int32)
        cache = init_kv(self.cache_config, batch, capacity, dtype)
        return FalconDraft(cache, jnp.zeros((batch,), jnp.int32), zeros(k, size), zeros(k - 1, size), tokens)

    def axes(self, draft):
        vectors = ("batch", None, None)
        return FalconDraft(kv_axes(draft.cache), ("batch",), vectors, vectors, ("batch", None))

    def read(self, params, features, block, cache, past=None, places=None):
        """See `FeatureDrafter.read`. Places `[B, T]` of pairs in their blocks are counted from position 0 if not given."""
        places = block.positions % self.block if places is None else places
        embeds = self.embed(params, block.tokens)
        return self.head(params["draft"], embeds, features, block, cache, past, places=places)

    def prefill(self, params, draft, chunk, output):
        count = chunk.real.sum(axis=1, dtype=jnp.int32)
        return self.taken(params, draft, self.features(output), chunk.following, count)

    def observe(self, params, draft, proposal, output, verdict):
        path = jnp.maximum(verdict.path, 0)
        features = jnp.take_along_axis(self.features(output), path[:, :, None], axis=1)
        return self.taken(params, draft, features, verdict.emitted, verdict.committed)

    def taken(self, params, draft, features, tokens, count):
        """The state after the first `count` `[B]` of more pairs, features `[B, T, E]` and tokens `[B, T]`.

        Blocks are counted back from the last of them, so that the first one may begin with pairs of the state.
        """
        k, width = self.block, tokens.shape[1]
        known = k - 1  # pairs of the state
        features = jnp.concatenate([draft.features, features.astype(draft.features.dtype)], axis=1)
        tokens = jnp.concatenate([draft.tokens, tokens], axis=1)
        begin = (known + count) % k  # pairs before it belong to a block that was read
        at = begin[:, None] + jnp.arange(-(-(known + width) // k) * k)[None]
        real = (at >= known - draft.length[:, None]) & (at < known + count[:, None])
        take = lambda x: jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1, mode="clip")
        positions = jnp.maximum(draft.length[:, None] - known + at, 0)
        start = jnp.maximum(draft.length - known + begin, 0)
        slots = jnp.arange(at.shape[1])
        joint = slots[None] // k <= slots[:, None] // k
        visible = (joint[None] & real[:, None]) | (slots[None] == slots[:, None])[None]
        # a block at a text's beginning may lack its first pairs: the others begin empty
        places = slots[None] % k * (real & jnp.pad(real[:, :-1], ((0, 0), (1, 0))))
        block = Block(take(tokens), positions, start, visible)
        h, delta = self.read(params, take(features), block, draft.cache, None, places)
        # as in the step, the write is made to come after the read, so that the cache is updated in place
        after = jnp.where(jnp.isnan(h[:, 0, 0]), 0, draft.length)
        cache = commit_kv(draft.cache, delta, known - begin[:, None] + jnp.arange(width)[None], after)
        newest = lambda x, first, size: jnp.take_along_axis(
            x, (first[:, None] + jnp.arange(size)[None]).reshape(-1, size, *[1] * (x.ndim - 2)), axis=1, mode="clip"
        )
        outputs = newest(h, known + count - begin - k, k).astype(draft.outputs.dtype)
        outputs = jnp.where((count > 0)[:, None, None], outputs, draft.outputs)
        return FalconDraft(
            cache, draft.length + count, outputs, newest(features, count, known), newest(tokens, count, known)
        )

    def propose(self, params, draft, view, sampler):
        grow = lambda grown, level: self.grown(params, draft, grown, level)
        first = draft.outputs[:, :1]
        sampler = self.restricted(params, sampler)
        dist = self.logits(params, first)[:, 0]
        tree = self.expander(view.root, dist, grow, self.begun(draft, first), sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def begun(self, draft, first):
        """The root alone, whose distribution was computed from `first` `[B, 1, E]`."""
        batch = len(draft.length)
        none = jnp.zeros((batch, 1), jnp.int32)
        recent = jnp.zeros((batch, 1, self.block - 1), jnp.int32)
        return Grown(None, draft.outputs[:, None], none, jnp.zeros((batch, 1, 1), bool), recent, first)

    def grown(self, params, draft, grown, level):
        """See `specjax.expand.base.Grow`. Only every k-th level is read by the head."""
        k, (batch, count) = self.block, level.tokens.shape
        above = lambda x: jnp.take_along_axis(x, (level.parent + 1).reshape(batch, count, *[1] * (x.ndim - 2)), axis=1)
        path = jnp.concatenate([above(grown.recent), level.tokens[..., None]], axis=2)
        own, seen, past, outputs = above(grown.block), above(grown.seen), grown.past, grown.outputs
        row, number = level.depth % k, outputs.shape[1]
        if row == 0:
            each = jnp.broadcast_to(jnp.eye(count, dtype=bool), (batch, count, count))
            visible = jnp.concatenate([seen[:, :, 1:], each], axis=2)
            visible = jnp.repeat(jnp.repeat(visible, k, axis=1), k, axis=2)
            places = jnp.broadcast_to(jnp.tile(jnp.arange(k), count)[None], (batch, count * k))
            positions = draft.length[:, None] + level.depth - k + places
            block = Block(path.reshape(batch, count * k), positions, draft.length, visible)
            fed = jnp.take_along_axis(outputs, own[:, :, None, None], axis=1).reshape(batch, count * k, -1)
            h, delta = self.read(params, fed, block, draft.cache, past, places)
            past = stack_past(past, delta)
            outputs = jnp.concatenate([outputs, h.reshape(batch, count, k, -1).astype(outputs.dtype)], axis=1)
            own = jnp.broadcast_to(number + jnp.arange(count, dtype=jnp.int32)[None], (batch, count))
            pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, count)))
            before, seen = pad(grown.seen), jnp.concatenate([seen, each], axis=2)
        else:
            before = grown.seen
        h = outputs[:, :1, row]  # the nodes above the first drafted block share the root's distributions
        if level.depth >= k:
            h = jnp.take_along_axis(outputs[:, :, row], own[:, :, None], axis=1)
        more = lambda a, b: jnp.concatenate([a, b], axis=1)
        after = Grown(
            past,
            outputs,
            more(grown.block, own),
            more(before, seen),
            more(grown.recent, path[..., 1:]),
            h,
        )
        return after, self.logits(params, h)

    def hidden(self, carry):
        return carry.h[:, -1]
