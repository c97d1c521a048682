"""Text that a draft model wrote, cut into the target's tokens on the device: from the left, the longest token that fits.

A tokenizer's own rule is another one (byte pairs are merged in the order in which they were learnt, within words). Where
they differ, a draft is rejected, and nothing else changes.

Shapes: `B` rows, `K` drafted tokens, `M` bytes of a row, `S` the longest token that is found, `V` tokens.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

LONGEST = 24
"""S, in bytes. Longer tokens are rare, and are not found."""
PER_TOKEN = 8
"""M for each drafted token. What is beyond is left out."""
_BASES = (16777619, 2654435761)
"""Of two polynomials modulo 2**32: tokens are found by the value of one, and are what was looked for by the other's."""


def piece_arrays(target: Sequence[bytes | None], draft: Sequence[bytes | None]) -> dict[str, np.ndarray]:
    """Arrays for `pieces`.

    Args:
      target: what each of the target's tokens writes, None if nothing.
      draft: the same of the draft model's.

    Returns:
      `values` and `checks` `[V]` uint32, the two polynomials of the texts of the target's tokens, ascending; `pieces`
      `[V]` int32, the tokens; `texts` `[V', S]` uint8, the bytes that each of the draft model's tokens writes, and
      `sizes` `[V']` int32, how many: 0 for a token without a text or with a longer one, which ends a draft.
    """
    known = {text: token for token, text in enumerate(target) if text and len(text) <= LONGEST}
    rows, lengths = _rows(list(known))
    values, checks = (_polynomials(rows, base)[np.arange(len(rows)), lengths - 1] for base in _BASES)
    order = np.argsort(values, kind="stable")
    texts, sizes = _rows([text if text and len(text) <= LONGEST else b"" for text in draft])
    return {
        "values": values[order],
        "checks": checks[order],
        "pieces": np.asarray(list(known.values()), np.int32)[order],
        "texts": texts,
        "sizes": sizes,
    }


def _rows(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros((len(texts), LONGEST), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return rows, np.asarray([len(text) for text in texts], np.int32)


def _powers(base: int) -> np.ndarray:
    return np.asarray([pow(base, power, 1 << 32) for power in range(LONGEST)], np.uint32)


def _polynomials(rows: np.ndarray, base: int) -> np.ndarray:
    """`[..., S]` uint32: the polynomial of every beginning of a text `[..., S]` uint8."""
    return np.cumsum((rows.astype(np.uint32) + 1) * _powers(base), axis=-1, dtype=np.uint32)


def pieces(arrays: Mapping[str, Array], tokens: Array, count: int) -> Array:
    """The target's tokens `[B, count]` int32 that write what the draft model's tokens write; -1 after the last.

    Args:
      arrays: from `piece_arrays`.
      tokens: `[B, K]` int32, of the draft model.
      count: how many, at most.
    """
    text, size = _joined(arrays, tokens)
    width = text.shape[1]
    windows = jnp.pad(text, ((0, 0), (0, LONGEST)))[:, jnp.arange(width)[:, None] + jnp.arange(LONGEST)[None]]
    within = jnp.arange(1, LONGEST + 1)[None, None] + jnp.arange(width)[None, :, None] <= size[:, None, None]
    sums = [
        jnp.cumsum((windows.astype(jnp.uint32) + 1) * jnp.asarray(_powers(base))[None, None], axis=-1, dtype=jnp.uint32)
        for base in _BASES
    ]
    at = jnp.minimum(jnp.searchsorted(arrays["values"], sums[0]), arrays["values"].shape[0] - 1)
    known = within & (arrays["values"][at] == sums[0]) & (arrays["checks"][at] == sums[1])
    longest = jnp.where(known, jnp.arange(1, LONGEST + 1)[None, None], 0).max(axis=-1)
    place = jnp.maximum(longest - 1, 0)[..., None]
    found = jnp.where(longest > 0, jnp.take_along_axis(arrays["pieces"][at], place, axis=-1)[..., 0], -1)

    def next_piece(place, _):
        take = lambda x: jnp.take_along_axis(x, jnp.minimum(place, width - 1)[:, None], axis=1)[:, 0]
        token = jnp.where(place < width, take(found), -1)
        return jnp.where(token >= 0, place + take(longest), width), token

    return jax.lax.scan(next_piece, jnp.zeros_like(size), None, length=count)[1].T


def _joined(arrays: Mapping[str, Array], tokens: Array) -> tuple[Array, Array]:
    """What tokens write up to the first that writes nothing: bytes `[B, M]`, and how many there are."""
    rows, drafted = tokens.shape
    width = PER_TOKEN * drafted
    sizes = arrays["sizes"][tokens]
    sizes = jnp.where(jnp.cumprod(sizes > 0, axis=1) > 0, sizes, 0)
    ends = jnp.cumsum(sizes, axis=1)
    place = jnp.arange(LONGEST)[None, None]
    at = jnp.where(place < sizes[..., None], (ends - sizes)[..., None] + place, width).reshape(rows, -1)
    own = arrays["texts"][tokens].reshape(rows, -1)
    text = jnp.zeros((rows, width), jnp.uint8).at[jnp.arange(rows)[:, None], at].set(own, mode="drop")
    return text, jnp.minimum(ends[:, -1], width)
