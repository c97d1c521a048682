"""Drafting with several modules, of which the i-th drafts the token at depth i (MiMo-V2-Flash, arXiv:2601.02780).

Every module reads the target's features. Its slot t holds the pair (feature of token t - i, embedding of token t + 1), and
its output there predicts token t + 2. So all modules have a slot for every committed pair, and the first i slots of module
i, which have no feature, are never seen. A depth beyond the last module is drafted by that one, which then feeds on its own
outputs, as a single module does.

Shapes: `B` rows, `T` pairs, `E` width, `M` modules, `P` nodes scored so far, `F` nodes of a level.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.lm import Block
from specjax.models.kv import KVCache, KVDelta, stack_past

Array = jax.Array


class Drafted(NamedTuple):
    """What is carried from level to level.

    Attributes:
      tokens: `[B, P]`.
      depths: the depth of each of them.
      visible: `[B, P, P]`, which of them each sees.
      outputs: `[B, P, E]`, by the module of the last level.
      past: their keys and values, by that module; None before the first level.
    """

    tokens: Array
    depths: tuple[int, ...]
    visible: Array
    outputs: Array
    past: KVDelta | None


def start(batch: int, width: int) -> Drafted:
    """The state before the first level, of modules of `width`."""
    return Drafted(
        jnp.zeros((batch, 0), jnp.int32), (), jnp.zeros((batch, 0, 0), bool), jnp.zeros((batch, 0, width)), None
    )


def of_each(features: Array, before: Array) -> Array:
    """The feature that each module reads in each slot, `[B, T, M, E]`: that of i tokens earlier for module i.

    Args:
      features: `[B, T, E]`, the target's.
      before: `[B, M - 1, E]`, those before them, the newest first.
    """
    modules, length = before.shape[1] + 1, features.shape[1]
    line = jnp.concatenate([before[:, ::-1].astype(features.dtype), features], axis=1)
    return jnp.stack([line[:, modules - 1 - i : modules - 1 - i + length] for i in range(modules)], axis=2)


def read(drafter: Any, params: Any, features: Array, block: Block, cache: KVCache | None) -> tuple[Array, KVDelta]:
    """All modules over pairs, whose features are those of `of_each`.

    Returns:
      `[B, T, M * E]`, the first module's outputs beside the features that the next M - 1 drafts read, and the pairs' part of
      the cache.
    """
    outputs, parts = [], []
    for i in range(drafter.modules):
        h, delta = run(drafter, params, i, features[:, :, i], block, cache)
        outputs.append(h)
        parts.append((delta.key[0], delta.value[0]))
    keys, values = zip(*parts, strict=True)
    first = outputs[0]
    kept = features[:, :, :-1].reshape(*features.shape[:2], -1).astype(first.dtype)
    return jnp.concatenate([first, kept], axis=-1), KVDelta(keys, values, block.positions)


def run(
    drafter: Any, params: Any, i: int, features: Array, block: Block, cache: KVCache | None, past: KVDelta | None = None
) -> tuple[Array, KVDelta]:
    """Module i over pairs with features `[B, T, E]`: its outputs, and their part of its cache."""
    own = None if cache is None else KVCache((cache.key[i],), (cache.value[i],))
    embeds = drafter.embed(params, block.tokens)
    return drafter.heads[i](params["draft"]["modules"][i], embeds, features, _masked(block, i, own, past), own, past)


def _masked(block: Block, first: int, cache: KVCache | None, past: KVDelta | None) -> Block:
    """A block whose queries see no slot before `first`."""
    if first == 0:
        return block
    visible, unseen = block.visible, None
    if visible is None:
        visible = jnp.tril(jnp.ones((1, *2 * block.tokens.shape[1:]), bool))
    at = block.positions if past is None else jnp.concatenate([past.positions, block.positions], axis=1)
    visible = visible & (at >= first)[:, None, :]
    if cache is not None:
        batch, slots = block.tokens.shape[0], cache.key[0].shape[2]
        unseen = jnp.broadcast_to(jnp.arange(slots)[None] < first, (batch, slots))
    return dataclasses.replace(block, visible=visible, unseen=unseen, split=False)


def grow(drafter: Any, params: Any, draft: Any, carry: Drafted, level: Any) -> tuple[Drafted, Array]:
    """Scores a level; see `specjax.expand.base.Grow`. Module i reads all nodes so far, since it has read none before."""
    c, width = carry, drafter.config.hidden_size
    known, new = c.tokens.shape[1], level.tokens.shape[1]
    tokens = jnp.concatenate([c.tokens, level.tokens], axis=1)
    depths = (*c.depths, *(level.depth,) * new)
    seen = jnp.broadcast_to(level.visible, (*level.tokens.shape, known + new))
    visible = jnp.concatenate([jnp.pad(c.visible, ((0, 0), (0, 0), (0, new))), seen], axis=1)
    at = draft.length[:, None] + jnp.asarray(depths)[None] - 1
    last = drafter.modules - 1
    if level.depth <= last:
        recent = draft.feature[:, width:].reshape(tokens.shape[0], last, width)
        features = recent[:, jnp.asarray([level.depth - depth for depth in depths])]
        block = Block(tokens, at, draft.length, visible)
        outputs, past = run(drafter, params, level.depth, features, block, draft.cache)
    else:
        features = jnp.take_along_axis(c.outputs, level.parent[:, :, None], axis=1)
        block = Block(level.tokens, at[:, known:], draft.length, level.visible)
        h, delta = run(drafter, params, last, features, block, draft.cache, c.past)
        outputs, past = jnp.concatenate([c.outputs, h], axis=1), stack_past(c.past, delta)
    return Drafted(tokens, depths, visible, outputs, past), drafter.logits(params, outputs[:, known:])
