"""LongSpec: a draft layer whose memory does not grow with the text, over a layer of the target's cache (Yang et al. 2025,
arXiv:2502.17421)."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, Trained, TreeDrafter, caught_up
from specjax.draft.feature import head_config
from specjax.draft.head import draft_logits, head_columns, params_dtype
from specjax.draft.model import ModelDraft
from specjax.expand import Expander, TopK
from specjax.lm import Block
from specjax.models.kv import KVCache, KVDelta, commit_kv, init_kv, kv_axes, stack_past

if TYPE_CHECKING:
    from specjax.draft.longspec.network import LongSpecHead

Array = jax.Array

AHEAD = 64
"""How many slots a ring has besides its window, at least: prompts are written so many tokens at a time."""


@dataclasses.dataclass(frozen=True)
class LongSpec(TreeDrafter, Trained):
    """Drafts with one decoder layer over the target's embeddings, and reads its outputs with the target's head.

    The layer sees the last `window` tokens through keys of its own, and the whole text through the keys of one layer of the
    target, which are in the target's cache. So its state is a ring of the window, however long the text is. A draft still
    reads that layer of the cache, which grows; it reads no other.

    Nodes of a tree see the target's keys of the committed tokens before the root, whatever their depth. In training, a token
    does not see the target's last one to four keys either.

    `params["draft"]` is LongSpecHead's, and optionally `head`: {`kernel` `[E, U]`} and `ids` `[U]` for fewer draft tokens.

    Attributes:
      expander: turns next-token distributions into a tree.
      window: how many tokens the layer's own attention sees, itself included; the authors' 512 tokens before it and itself.
      layer: the layer of the target whose keys it reads; -1: the last one with plain attention to the whole text.
      config: the layer's `ModelConfig`; None for the target's own sizes, with biases of queries, keys and values.
      target: filled in by `bind`.
    """

    about = About(
        "longspec",
        "a layer over a window, and over the target's last keys and values",
        "arXiv:2502.17421",
        expander="top_k:k=2,depth=3,nodes=6",
        paper="expander=eagle2,k=16,depth=5,nodes=69",
        loads="head",
    )

    expander: Expander = TopK(2, 3, 6)
    window: int = 513
    layer: int = -1
    config: Any = None
    target: Any = None

    @property
    def cache_config(self):
        return self.config

    @property
    def head(self) -> "LongSpecHead":
        """The layer's module, as functions."""
        from specjax.draft.longspec.network import LongSpecHead

        theirs = self.target.laid_out.attention(self.layer)
        own = self.config.attention()
        cross = dataclasses.replace(
            own, num_key_value_heads=theirs.num_key_value_heads, v_head_dim=theirs.value_dim, window=None,
            rope=theirs.rope, qk_norm=None, source=0,
        )  # fmt: skip
        return LongSpecHead(self.config, cross)

    def bind(self, target):
        from specjax.models.attention import AttentionConfig

        theirs = head_config(target, "longspec")
        if self.window < 2:
            raise ValueError(f"longspec: a window has at least 2 tokens, got window={self.window}")
        if getattr(target, "old", None) is not None:
            raise ValueError(
                f"longspec reads the target's keys of the whole text, and the cache {type(target.old).__name__} forgets: leave "
                "one out"
            )
        layer = self.layer if self.layer >= 0 else max(_readable(theirs), default=-1)
        if layer not in _readable(theirs):
            raise ValueError(
                "longspec reads a layer of the target with plain attention to the whole text and keys of its own"
                + (
                    f": layer={layer} is none, choose one of {_readable(theirs)}"
                    if self.layer >= 0
                    else ", and it has none"
                )
            )
        own = self.config or theirs.plain(1).every(AttentionConfig, qkv_bias=True, o_bias=False, qk_norm=None)
        own = own.every(AttentionConfig, window=self.window)
        bound = dataclasses.replace(self, config=own, layer=layer, target=target)
        mine, keys = own.attention(), target.laid_out.attention(layer)
        if mine.head_dim != keys.head_dim or mine.num_attention_heads % keys.num_key_value_heads:
            raise ValueError(
                f"longspec: {mine.num_attention_heads} query heads of width {mine.head_dim} do not go with the "
                f"{keys.num_key_value_heads} of width {keys.head_dim} of the target's layer {layer}"
            )
        if own.hidden_size != theirs.hidden_size:
            raise ValueError(
                f"longspec: the layer is {own.hidden_size} wide, and the target's embeddings are {theirs.hidden_size} wide"
            )
        return bound

    def init_params(self, key, target_params):
        return self.head.init(key)

    @classmethod
    def objective(cls):
        from specjax.draft.longspec.objective import TrainLongSpec

        return TrainLongSpec

    @classmethod
    def layout(cls):
        from specjax.draft.longspec.published import LAYOUT

        return LAYOUT

    def init(self, params, batch, capacity):
        ahead = max(AHEAD, self.depth + 1)
        cache = init_kv(self.config, batch, capacity, params_dtype(params["draft"]), ahead)
        return ModelDraft(cache, jnp.zeros((batch,), jnp.int32))

    def axes(self, draft):
        return ModelDraft(kv_axes(draft.cache), ("batch",))

    def prefill(self, params, draft, chunk, output):
        block = chunk.block
        positions = draft.length[:, None] + jnp.arange(block.tokens.shape[1])[None]
        delta = self.head.keys(params["draft"], self.target.embed(params["target"], block.tokens), positions)
        length = draft.length + chunk.real.sum(axis=1, dtype=jnp.int32)
        return ModelDraft(_written(draft.cache, delta, draft.length, length), length)

    def catch_up(self, params, draft, view):
        return caught_up(self.prefill, params, draft, view)

    def trimmed(self, params, target_params, ids):
        own = {name: x[..., ids] for name, x in params.get("head", {}).items()}
        head = own or head_columns(self.target, target_params, ids)
        return self, {**params, "head": head, "ids": jnp.asarray(ids, jnp.int32)}

    def propose(self, params, draft, view, sampler):
        from specjax.draft.longspec.network import Seen

        length = view.length - 1  # the root has no keys in the target's cache yet
        place = self.target.config.places[self.layer]
        seen = Seen(length, view.cache.layer(place.slots, length))
        run = lambda block, cache, past: self.head(
            params["draft"], self.target.embed(params["target"], block.tokens), block, cache, seen, past
        )
        width = view.max_depth + 1
        positions = draft.length[:, None] + jnp.arange(width)[None]
        tokens = jnp.take_along_axis(view.tokens, positions, axis=1, mode="clip")
        h, delta = run(Block(tokens, positions, draft.length), draft.cache, None)
        # as in the step: the write is made to depend on the read, so that the cache is updated in place
        after = jnp.where(jnp.isnan(h[:, 0, 0]), 0, draft.length)
        own = ModelDraft(_written(draft.cache, delta, after, view.length), view.length)
        last = jnp.clip(view.length - draft.length - 1, 0, width - 1)
        h = jnp.take_along_axis(h, last[:, None, None], axis=1)

        def grow(carry, level):
            past, _ = carry
            positions = length[:, None] + jnp.full(level.tokens.shape, level.depth)
            h, delta = run(Block(level.tokens, positions, view.length, level.visible), own.cache, past)
            return (stack_past(past, delta), h), self.logits(params, h)

        first = self.logits(params, h)[:, 0]
        sampler = sampler.restricted(params["draft"].get("ids"), self.target.vocab_size)
        tree = self.expander(view.root, first, grow, (None, h), sampler, keep_q=view.keep_q)
        return Proposal(tree, own)

    def logits(self, params, h):
        """The distributions `[B, T, U]` of outputs `[B, T, E]`, by the draft's own head or the target's."""
        return draft_logits(self.target, params, h)

    def hidden(self, carry):
        """The outputs `[B, E]` from which the last distribution was computed."""
        return carry[1][:, -1]


def _readable(config: Any) -> list[int]:
    """The layers whose keys of the whole text are in the cache as they are."""
    own = config.attention_layers
    return [i for i in own if config.source(i) == i and config.window(i) is None and not config.attention(i).distances]


def _written(cache: KVCache, delta: KVDelta, start: Array, length: Array) -> KVCache:
    """A cache with the keys and values of tokens from `start` `[B]` on, of which those before `length` `[B]` are real.

    A ring has room for `ahead` tokens after the last real one, and is written at most so many at a time. What is not real
    lands in that room."""
    step = cache.ahead or delta.positions.shape[1]
    for first in range(0, delta.positions.shape[1], step):
        part = jax.tree.map(lambda x, first=first: x[:, first : first + step], delta)
        cache = commit_kv(cache, part, None, jnp.minimum(start + first, length))
    return cache
