"""What the steps of diffusion decoders share: draws, and the places of open positions in a canvas."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from specjax.kernels.verify import gumbel_argmax
from specjax.sampling.noise import keys_at

Array = jax.Array
Kind = TypeVar("Kind")

DRAW, CHOOSE = 3, 4  # purposes of noise, in addition to those of `specjax.sampling.noise`


def draws(scores: Array, keys: Array, at: Array, sampled: Array) -> Array:
    """Tokens `[B, W]` drawn from warped scores `[B, W, V]` with the noise of each row's key `[B]` and position `[B, W]`.

    They are the likeliest ones in rows that are not `sampled` `[B]`, and -1 where scores are not finite.
    """
    which = jnp.broadcast_to(jnp.arange(at.shape[1], dtype=jnp.int32)[None], at.shape)
    return gumbel_argmax(scores, keys_at(keys, at, DRAW), which, sampled)[0]


def widened(kind: type[Kind], value: Any, **more: Any) -> Kind:
    """A `kind`, which extends the dataclass of `value`, with the additional fields `more`."""
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, **more)


def check_whole_blocks(lm: Any, length: int) -> None:
    """Raises ValueError if passes over aligned blocks of `length` tokens lack tokens with which others choose experts.

    `length` 0 is for passes over any other part of a text. `LlamaLM.whole_blocks` says which tokens choose together.
    """
    size = getattr(lm, "whole_blocks", 1)
    if size > 1 and (not length or length % size):
        raise ValueError(
            f"this model's tokens choose experts together in blocks of {size}, which a pass holds whole: decode it in blocks "
            f"of {size} or a multiple, counted from the beginning of the text"
        )


def at_least_one(commit: Array, score: Array, masked: Array) -> Array:
    """The chosen masked positions `[B, W]`; in a row without any, its surest position."""
    commit = commit & masked
    best = jnp.argmax(jnp.where(masked, score, -jnp.inf), axis=1)
    surest = masked & (jnp.arange(masked.shape[1])[None] == best[:, None])
    return jnp.where(commit.any(axis=1, keepdims=True), commit, surest)


def first_open(tokens: Array, limit: Array, mask_id: int) -> Array:
    """The first open position `[B]` of canvases `[B, L]`; `limit` if there is none."""
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.min(jnp.where((tokens == mask_id) & (at < limit[:, None]), at, limit[:, None]), axis=1)


def ends_at(tokens: Array, opened: Array, end: Array, eos: Array) -> Array:
    """The first of the `opened` positions `[B, L]` below `end` `[B]` that holds one of `eos` `[B, K]`; L if there is none."""
    size = tokens.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)[None]
    hit = jnp.any(tokens[:, :, None] == eos[:, None, :], axis=2) & opened & (at < end[:, None])
    return jnp.min(jnp.where(hit, at, size), axis=1)


def block_of(values: Array, at: Array) -> Array:
    """The values `[B, W]` at positions `[B, W]` of canvases `[B, L]`; the last position's value beyond the end."""
    return jnp.take_along_axis(values, at, axis=1, mode="clip")


def put(tokens: Array, at: Array, where: Array, new: Array) -> Array:
    """Canvases `[B, L]` with new tokens `[B, W]` at those of the positions `at` `[B, W]` for which `where` `[B, W]` is
    true.
    """
    at = jnp.where(where, at, tokens.shape[1])
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(tokens, at, new)
