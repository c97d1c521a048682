"""The sources of randomness: a row's key, an absolute position and a purpose; never a slot, a batch or a step count."""

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
    digests = np.fromiter(map(_digest, identities), np.uint64)
    seeds = [seed] * digests.size if isinstance(seed, (int, np.integer)) else list(seed)
    if len(seeds) != digests.size:
        raise ValueError(f"there are {len(seeds)} seeds and {digests.size} identities: give one seed, or one for each")
    low = np.fromiter((int(own) % 2**64 for own in seeds), np.uint64, len(seeds))
    high = np.fromiter(((int(own) >> 64) % 2**63 for own in seeds), np.int64, len(seeds))
    table = np.stack([*_halves(digests)[::-1], _earlier(digests, low, high)], axis=1)
    return _fold(*jax.device_put((np.stack(_halves(low), axis=1), table)))


def _digest(identity: str | Sequence[int]) -> int:
    """64 bits of an identity; a string is never taken for token ids."""
    if isinstance(identity, str):
        data = b"id:" + identity.encode()
    else:
        data = b"ids:" + np.asarray(identity, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _halves(numbers: np.ndarray) -> list[np.ndarray]:
    """The upper and the lower 32 bits."""
    return [(numbers >> np.uint64(32)).astype(np.uint32), (numbers & np.uint64(2**32 - 1)).astype(np.uint32)]


def _earlier(*columns: np.ndarray) -> np.ndarray:
    """How many equal rows of these columns stand before each, `[B]` uint32."""
    order = np.lexsort(columns)  # stable: equal rows stay in their order
    count = np.arange(order.size)
    new = np.ones(order.size, bool)
    new[1:] = np.any([own[order][1:] != own[order][:-1] for own in columns], axis=0)
    found = np.empty(order.size, np.uint32)
    found[order] = count - np.maximum.accumulate(np.where(new, count, 0))
    return found


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
