"""MagicDec: the target drafts for itself from a few slots of its own cache (Chen et al. 2024, arXiv:2408.11049)."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter
from specjax.draft.magicdec import picking
from specjax.draft.magicdec.picking import POOL, WINDOW, Picked
from specjax.expand import Chain, Expander
from specjax.lm import Block, Wants
from specjax.models.kv import Slots, stack_past

Array = jax.Array

Keeps = Literal["snapkv", "streaming"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MagicDraft:
    """Which slots of the target's cache drafts read; nothing is copied.

    Attributes:
      prompt: `[B]` int32, the prompt's tokens before the first root.
      chosen: `[B]` bool, whether `slots` were chosen.
      slots: a tuple over layers with keys of their own that see the whole text, of `[B, K, C]` int32: the slots that
        each kv-head keeps of the prompt, -1 for none. Empty if no slots are chosen (`streaming`).
    """

    prompt: Any
    chosen: Any
    slots: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class MagicDec(TreeDrafter):
    """The target as its own draft model, over `budget` slots of its own cache; training-free.

    A draft costs a pass over all weights of the target, and over a cache that does not grow with the text. So it pays if
    a step of plain decoding reads more cache than weights: for long texts and large batches.

    - `streaming` (StreamingLLM, arXiv:2309.17453): the first `sinks` tokens and the newest ones, as if nothing had been
      between them. The published code turns all keys to positions in the small cache; here the first tokens' keys are
      turned towards the others, which gives the same scores. It also reads the prompt again
      through the small cache; here the target's own keys are read.
    - `snapkv` (SnapKV, arXiv:2404.14469): once a prompt was read, each kv-head keeps the slots that the prompt's last 32
      queries attend to most, and those 32. The queries are computed again, in one pass over these tokens. The `recent`
      newest tokens after the prompt are seen as well; the published code sees all of them.

    Layers with a window see it whole. Keys in eight bits are read as plain numbers.

    Attributes:
      keeps: see above.
      budget: the most slots of the prompt that a head reads.
      sinks: for `streaming`, how many of them are the text's first tokens.
      recent: for `snapkv`, how many tokens after the prompt are read besides.
      expander: turns next-token distributions into a tree.
      target: filled in by `bind`.
    """

    about = About(
        "magicdec",
        "the target itself, from a few slots of its cache",
        "arXiv:2408.11049",
        expander="chain:length=3",
    )

    keeps: Keeps = "snapkv"
    budget: int = 257
    sinks: int = 16
    recent: int = 128
    expander: Expander = Chain(3)
    target: Any = None

    def __post_init__(self):
        if self.keeps not in get_args(Keeps):
            raise ValueError(f"magicdec keeps {' or '.join(get_args(Keeps))}, not {self.keeps!r}")
        least = WINDOW if self.keeps == "snapkv" else self.sinks
        if self.sinks < 0 or self.recent < 1 or self.budget <= least:
            raise ValueError(
                f"magicdec needs sinks >= 0, recent >= 1 and a budget above {least} with keeps={self.keeps}, got {self}"
            )

    @property
    def looks_back(self):
        return WINDOW if self.keeps == "snapkv" else 0

    def bind(self, target):
        from specjax import models  # flax is slow to import

        if not isinstance(target, models.LlamaLM):
            raise ValueError(
                f"magicdec reads parts of its target's cache, and a {type(target).__name__} has none to read"
            )
        if target.old is not None:
            raise ValueError(
                f"magicdec keeps the whole text, and the cache {type(target.old).__name__} forgets: leave one out"
            )
        own, states = target.config.attentions, target.config.state_mixers
        reasons = {
            f"layers with {states[0].called if states else ''}": states,
            "layers without plain attention": len(own) < target.num_layers,
            "attention over a source": target.config.encoder is not None,
            "layers that see chunks of a text": any(one.chunked for one in own),
            "biases by distance": any(one.distances for one in own),
        }
        if what := next((reason for reason, has in reasons.items() if has), None):
            raise ValueError(
                f"magicdec needs plain attention over slots, and this model has {what}: choose another drafter"
            )
        return dataclasses.replace(self, target=target)

    @functools.cached_property
    def _whole(self) -> list[int]:
        """The layers whose slots are picked, of those with keys of their own."""
        config = self.target.config
        return [at for at, i in enumerate(config.owners) if config.window(i) is None]

    def init(self, params, batch, capacity):
        config, slots = self.target.laid_out, ()
        if self.keeps == "snapkv":
            heads = [config.attention(config.owners[at]).num_key_value_heads for at in self._whole]
            slots = tuple(jnp.full((batch, own, self.budget - WINDOW), -1, jnp.int32) for own in heads)
        return MagicDraft(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool), slots)

    def axes(self, draft):
        return MagicDraft(("batch",), ("batch",), (("batch", "kv_heads", None),) * len(draft.slots))

    def prefill(self, params, draft, chunk, output):
        return dataclasses.replace(draft, prompt=draft.prompt + chunk.real.sum(axis=1, dtype=jnp.int32))

    def propose(self, params, draft, view, sampler):
        draft = self._chosen(params["target"], draft, view)
        return Proposal(self._tree(params["target"], draft, view, sampler), draft)

    def _tree(self, target, draft, view, sampler):
        """The tree, drafted from slots that are chosen."""
        length = view.length - 1  # the root has no keys in the cache yet
        seen = Picked(self._picked(draft, view.cache, length))
        block = Block(view.root[:, None], length[:, None], length)
        output = self.target(target, block, seen, wants=Wants(logits=True, final=True))
        seen = seen.after(output.delta)

        def grow(carry, level):
            past, _ = carry
            positions = length[:, None] + jnp.full(level.tokens.shape, level.depth)
            own = Block(level.tokens, positions, view.length, level.visible)
            output = self.target(target, own, seen, wants=Wants(logits=True, final=True), past=past)
            return (stack_past(past, output.delta), output.final), output.logits

        return self.expander(view.root, output.logits[:, 0], grow, (None, output.final), sampler, keep_q=view.keep_q)

    def hidden(self, carry):
        """The features `[B, E]` from which the last distribution was computed."""
        return carry[1][:, -1]

    def _chosen(self, params, draft, view):
        """The state with slots chosen for all live rows; a pass over `WINDOW` tokens where a row has none."""
        if self.keeps == "streaming":
            return draft
        needed = lambda draft: jnp.any(view.live & ~draft.chosen)

        def choose(draft):
            start = jnp.maximum(draft.prompt - WINDOW, 0)
            positions = start[:, None] + jnp.arange(WINDOW)[None]
            tokens = jnp.take_along_axis(view.tokens, positions, axis=1, mode="clip")
            asked = picking.Asked(view.cache)
            queries = self.target(params, Block(tokens, positions, start), asked, wants=Wants()).delta.query
            own = [
                picking.attended(view.cache.key[at], queries[at], positions, draft.prompt, start, old.shape[2], POOL)
                for at, old in zip(self._whole, draft.slots, strict=True)
            ]
            mine = draft.chosen[:, None, None]
            slots = tuple(jnp.where(mine, old, new) for old, new in zip(draft.slots, own, strict=True))
            return MagicDraft(draft.prompt, jnp.ones_like(draft.chosen), slots)

        return jax.lax.while_loop(needed, choose, draft)

    def _picked(self, draft, cache, length) -> tuple[Slots, ...]:
        """What drafts see of the cache after `length` `[B]` tokens, of every layer with keys of its own."""
        config, out, whole = self.target.laid_out, [], 0
        for at, i in enumerate(config.owners):
            own, slots = config.attention(i), cache.layer(at, length)
            if own.window is not None:
                out.append(picking.newest(slots, length, own.window))
            elif self.keeps == "streaming":
                tables = (
                    None
                    if own.rope is None
                    else functools.partial(picking.turn, own.rope, own.head_dim, config.max_position_embeddings)
                )
                out.append(picking.streamed(slots, length, self.sinks, self.budget, tables))
            else:
                first = jnp.maximum(draft.prompt, length - self.recent)
                lately = first[:, None] + jnp.arange(self.recent)[None]
                window = jnp.maximum(draft.prompt - WINDOW, 0)[:, None] + jnp.arange(WINDOW)[None]
                window = jnp.where(window < draft.prompt[:, None], window, -1)
                lately = jnp.where(lately < length[:, None], lately, -1)
                out.append(picking.kept(slots, draft.slots[whole], jnp.concatenate([window, lately], axis=1)))
                whole += 1
        return tuple(out)
