"""What mixers with a running state share: ancestors of a block's tokens, convolutions and decays along paths, and commits.

A token of a block reads the committed text through the state and its own ancestors through the block. The ancestors of a
token are in order: an ancestor's index is below that of the tokens after it. So all that happens between an ancestor and
a token is a sum over the ancestors with a larger index, and no parent is needed.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `M` tokens of a path, `K` width of a
convolution, `C` channels, `N` heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.kernels.path_decays import since_each
from specjax.kernels.tree_attention.unrolled import Unrolled
from specjax.lm import Block

Array = jax.Array

CHUNK = 64
"""Tokens of a text that are computed at once: work and memory grow with the square of this number."""


class Ancestors(NamedTuple):
    """Which of the P tokens before a block and of its own T tokens a token follows.

    Attributes:
      seen: `[B or 1, T, P + T]` bool; a token follows itself.
      text: whether every token follows all tokens before it.
    """

    seen: Array
    text: bool


def ancestors(block: Block, before: int) -> Ancestors:
    """The ancestors of a block's tokens.

    Args:
      block: the block.
      before: P.

    Raises:
      ValueError: if tokens read later ones, or slots that are no tokens of their path.
    """
    size = block.tokens.shape[1]
    if block.visible is None and block.causal:
        return Ancestors(jnp.tril(jnp.ones((size, before + size), bool), before)[None], True)
    if block.visible is None or isinstance(block.visible, Unrolled) or block.unseen is not None:
        raise ValueError(
            "a layer with a running state reads a text from left to right: this way of decoding or training reads it both "
            "ways, or parts of it again"
        )
    return Ancestors(jnp.broadcast_to(block.visible, (len(block.visible), size, before + size)), False)


def parents(ancestors: Ancestors) -> Array:
    """The last token before each of the P + T tokens on its path, `[B or 1, P + T]` int32; -1: there is none, or no token of
    the block follows it."""
    seen, text = ancestors
    at = jnp.arange(seen.shape[2], dtype=jnp.int32)
    if text:
        return at[None] - 1
    follower = jnp.argmax(seen, axis=1)[:, :, None]
    path = jnp.take_along_axis(seen, jnp.broadcast_to(follower, (*follower.shape[:2], seen.shape[2])), axis=1)
    path = path & jnp.any(seen, axis=1)[:, :, None] & (at[None, None] < at[None, :, None])
    return jnp.max(jnp.where(path, at[None, None], -1), axis=2)


def every(past: Any, own: Any) -> Any:
    """What P tokens before a block and its own T tokens have, `[B, P + T, ...]` for each leaf; `past` may be None."""
    return own if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), past, own)


def convolved(kernel: Array, window: Array, inputs: Array, ancestors: Ancestors) -> Array:
    """A depthwise convolution over a token and the K - 1 tokens before it on its path, `[B, T, C]`.

    Args:
      kernel: `[K, C]`; the last entry is for the token itself.
      window: `[B, K - 1, C]`, the inputs of the last committed tokens, oldest first.
      inputs: `[B, P + T, C]`.
      ancestors: of the block's tokens.
    """
    seen, text = ancestors
    width, size, total = len(kernel), seen.shape[1], seen.shape[2]
    kernel = kernel[:, None, None]
    joined = jnp.concatenate([window, inputs], axis=1)
    if text:
        taps = (joined[:, total - size + at : total + at] for at in range(width))
        return sum(kernel[at] * tap for at, tap in enumerate(taps))  # type: ignore[return-value]
    # of an ancestor: how many come after it on the path
    following = jnp.flip(jnp.cumsum(jnp.flip(seen, 2), axis=2), 2) - 1
    depth = seen.sum(axis=2) - 1
    made = kernel[-1] * inputs[:, total - size :]
    for back in range(1, width):
        at = width - 1 + jnp.argmax(seen & (following == back), axis=2)
        at = jnp.where(depth >= back, at, width - 1 + depth - back)
        at = jnp.broadcast_to(at, (len(inputs), size))
        made = made + kernel[width - 1 - back] * jnp.take_along_axis(joined, at[..., None], axis=1)
    return made


def moved(window: Array, inputs: Array, count: Array) -> Array:
    """The window after a path, `[B, K - 1, C]`: the last inputs of `window` and of the first `count` of `inputs`.

    Args:
      window: `[B, K - 1, C]`, oldest first.
      inputs: `[B, M, C]`.
      count: `[B]` int32.
    """
    joined = jnp.concatenate([window, inputs.astype(window.dtype)], axis=1)
    at = count[:, None] + jnp.arange(window.shape[1])[None]
    return jnp.take_along_axis(joined, at[..., None], axis=1)


def real(count: Array, x: Array) -> Array:
    """`x` `[B, M, ...]` with zeros after the first `count` `[B]` of its tokens."""
    kept = jnp.arange(x.shape[1])[None] < count[:, None]
    return jnp.where(kept.reshape(*kept.shape, *[1] * (x.ndim - 2)), x, 0)


def weights(log_decay: Array, count: Array) -> tuple[Array, Array]:
    """How much of the state and of each token's contribution is left at the end of a path; a path without tokens keeps all.

    Args:
      log_decay: `[B, M, ...]` float32.
      count: `[B]` int32, how many of a row's tokens are on the path.

    Returns:
      `[B, ...]` and `[B, M, ...]`; the latter is 0 for tokens that are not on the path.
    """
    left, later = sums(log_decay, count)
    return jnp.exp(left), real(count, jnp.exp(later))


def sums(x: Array, count: Array) -> tuple[Array, Array]:
    """The sum of `x` `[B, M, ...]` over the first `count` `[B]` tokens of a path, `[B, ...]`; and over those of them after each
    token, `[B, M, ...]`."""
    since, later = since_each(real(count, x), 1)
    return since[:, 0], later


def in_chunks(read: Callable[[Any, Any], tuple[Any, Any]], state: Any, own: Any, size: int = CHUNK) -> Any:
    """What a long causal block's tokens get, computed `size` tokens at a time.

    Args:
      read: from a state and a chunk's inputs `[B, size, ...]` to the state after the chunk and results `[B, size, ...]`.
      state: before the block.
      own: a pytree of inputs `[B, T, ...]`; zeros fill the last chunk up, so inputs of zeros must leave a state unchanged.

    Returns:
      The results of all chunks, `[B, T, ...]` for each leaf.
    """
    length = jax.tree.leaves(own)[0].shape[1]
    count = -(-length // size)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, count * size - length), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(len(x), count, size, *x.shape[2:]), 1, 0)

    made = jax.lax.scan(read, state, jax.tree.map(cut, own))[1]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length], made)


def read_text(
    read: Callable[[Any, Any, Array], Any], after: Callable[[Any, Any, Any, Array], Any], state: Any, past: Any, own: Any,
    size: int = CHUNK,
) -> Any:  # fmt: skip
    """What a text's tokens get, computed `size` tokens at a time, after all uncommitted tokens are in the state.

    Args:
      read: from a state, a chunk's inputs `[B, size, ...]` and `[1, size, size]` bool, which of them a token follows, to what
        the chunk's tokens get, `[B, size, ...]` for each leaf.
      after: from a state, inputs `[B, M, ...]`, what their tokens got, and a number `[B]` of them to the state after them. For
        `past`, the second is `past` and the third None.
      state: before `past`.
      past: what `after` reads of the uncommitted tokens, `[B, P, ...]`; None: there are none.
      own: of the block's tokens; see `in_chunks`.
    """
    whole = lambda x: jnp.full(len(jax.tree.leaves(x)[0]), jax.tree.leaves(x)[0].shape[1], jnp.int32)
    if past is not None:
        state = after(state, past, None, whole(past))
    seen = jnp.tril(jnp.ones((1, size, size), bool))

    def step(state: Any, chunk: Any) -> tuple[Any, Any]:
        got = read(state, chunk, seen)
        return after(state, chunk, got, whole(chunk)), got

    return in_chunks(step, state, own, size)
