"""The sources of randomness: a row's key, an absolute position and a purpose; never a slot, a batch or a step count."""

import collections
import hashlib
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.verify.gumbel import gumbel_noise
from specjax.settings import settled

Array = jax.Array

GUMBEL, ACCEPT, RESIDUAL = 0, 1, 2  # purposes: the shared Gumbel vector, acceptance uniforms, the residual's draw
COIN, STEP = 5, 6
"""Purposes: a warper that acts at some places only, and the key of a step's own noise. `specjax.diffusion.common` has 3
and 4.
"""
CHILDREN, ORDER = 7, 8
"""Purposes: draws of a node's children with separate noise, and the order in which a verifier tries them."""
MIXTURE = 9
"""Purpose: the weights of a mixture of tokens, unless the shared Gumbel vector makes them."""
RESAMPLE, CHOICE, RETRY, REPEATS = 10, 11, 12, 13
"""Purposes: which particles go on, which one is a row's text, a second order of a place's tokens, and how often refused tokens
come up again."""


def row_keys(seed: int | Sequence[int], identities: Iterable[str | Sequence[int]]) -> Array:
    """One typed threefry key per record, `[B]`.

    A record is identified by its string id or, without one, by its prompt's token ids. Records with equal identity are
    told apart by their order in the input. So a row's noise does not depend on the batch, slot or host that decodes it.

    Args:
      seed: one seed, or one per record: 64-bit integers. Seeds that are equal modulo 2^64 give equal keys.
      identities: string ids or token ids.
    """
    identities = list(identities)
    seeds = [seed] * len(identities) if isinstance(seed, (int, np.integer)) else list(seed)
    counts: collections.Counter = collections.Counter()
    words = []
    for own_seed, identity in zip(seeds, identities, strict=True):
        if isinstance(identity, str):
            data = b"id:" + identity.encode()
        else:
            data = b"ids:" + np.asarray(identity, "<i4").tobytes()
        digest = hashlib.blake2b(data, digest_size=8).digest()
        words.append((*np.frombuffer(digest, "<u4"), counts[own_seed, digest]))
        counts[own_seed, digest] += 1
    table = np.asarray(words, np.uint32).reshape(-1, 3)
    halves = np.asarray([divmod(int(s) % 2**64, 2**32) for s in seeds], np.uint32).reshape(-1, 2)
    return _fold(*jax.device_put((halves, table)))


def keys_of(data: Array) -> Array:
    """Typed threefry keys from their data `[..., 2]` uint32, whatever the default kind of keys."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


@jax.jit
@settled
def _fold(seeds, words):
    def one(seed, word):
        high, low = seed
        folds = jnp.concatenate([high[None], word])
        skipped = (jnp.arange(4) == 0) & (high == 0)  # as it was when seeds had 32 bits

        def fold(key, each):
            number, skip = each
            folded = jax.random.key_data(jax.random.fold_in(keys_of(key), number))
            return jnp.where(skip, key, folded), None

        first = jax.random.key_data(jax.random.key(low, impl="threefry2x32"))
        return keys_of(jax.lax.scan(fold, first, (folds, skipped))[0])  # a single hash to compile

    return jax.vmap(one)(seeds, words)


def keys_at(keys: Array, positions: Array, purpose: int) -> Array:
    """Keys `[B, T]` of the draws at absolute positions `[B, T]`."""

    def one(key, position):
        return jax.random.fold_in(jax.random.fold_in(key, position), purpose)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, positions)


def gumbel(keys: Array, positions: Array, vocab: int, purpose: int = GUMBEL) -> Array:
    """Standard Gumbel vectors `[B, T, V]`, one per position."""
    return gumbel_at(keys, positions, jnp.arange(vocab)[None, None], purpose)


def gumbel_at(keys: Array, positions: Array, ids: Array, purpose: int = GUMBEL) -> Array:
    """The entries `ids` `[B, T, C]` of the Gumbel vectors `[B, T, V]`, without making the others.

    A threefry draw is a function of the key and its index, so the cost is proportional to the number of entries.
    """
    words = jax.random.key_data(keys_at(keys, positions, purpose))[:, :, None]
    return gumbel_noise(words[..., 0], words[..., 1], ids)


def uniform(keys: Array, positions: Array, purpose: int = ACCEPT, shape: tuple[int, ...] = ()) -> Array:
    """Uniforms in [0, 1), `[B, T, ...]`, for each position so many as the `shape` says, one if it is empty."""
    draw = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, shape, jnp.float32)))
    return draw(keys_at(keys, positions, purpose))
