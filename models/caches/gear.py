"""GEAR (arXiv:2403.05527): few bits, a low-rank approximation of their errors, and exact outliers."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.models.caches.base import Old
from specjax.pretty import Pretty

Array = jax.Array

ITERATIONS = 3
"""Iterations of the power method for the low-rank factors."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Geared(Pretty):
    """Matrices `[..., g, H]` of a chunk's keys or values. A vector is a channel over the tokens, or a token over the
    channels.

    Attributes:
      codes: `[..., g, H * bits / 8]` uint8; for 16 bits, `[..., g, H]` uint16.
      scale: `[..., 1, H]` or `[..., g, 1]`, one for every vector.
      least: as `scale`, the value of code 0.
      left: `[..., g, r]`, the left low-rank factor.
      right: `[..., H, r]`, the right low-rank factor.
      values: the outliers of every vector; their number replaces the vector's axis.
      places: as `values`, their indices in the vector.
    """

    codes: Array
    scale: Array
    least: Array
    left: Array
    right: Array
    values: Array
    places: Array


@dataclasses.dataclass(frozen=True)
class GEAR(Old):
    """Keeps every token in few bits, with low-rank error correction and exact outliers.

    A chunk's keys are quantised by channel and its values by token, each between the minimum and the maximum of its
    vector without outliers. The errors of a head's matrix are approximated in low rank. A step restores all chunks. In
    the paper, the rank is higher for a prompt than for generated text; here all chunks have the same rank.

    Attributes:
      chunk: see `Old`; the tokens of a channel that share a scale.
      bits: 2, 4, 8 or 16.
      rank: r; 0: none.
      outliers: the share of a vector that is kept exactly, half of it the greatest numbers and half the least (at least
        one of each); 0: none (GEAR-L).
    """

    about = About(
        "gear", "all are kept in few bits, with their errors in low rank and outliers", "arXiv:2403.05527", "lossy"
    )

    chunk: int = 64
    bits: int = 4
    rank: int = 2
    outliers: float = 0.02

    def __post_init__(self):
        if (
            self.bits not in (2, 4, 8, 16)
            or self.rank < 0
            or not 0 <= self.outliers < 1
            or self.recent < 0
            or self.chunk < 1
        ):
            raise ValueError(f"gear needs bits 2, 4, 8 or 16, rank >= 0, outliers in [0, 1) and a chunk, got {self}")

    def init(self, config, layer, batch, capacity, dtype):
        kind = config.attention(layer)
        if kind.head_dim * self.bits % 8:
            raise ValueError(
                f"gear packs {self.bits} bits into bytes, and a head's {kind.head_dim} numbers do not fill whole bytes: "
                "choose more bits"
            )
        chunk = jax.ShapeDtypeStruct((batch, kind.num_key_value_heads, self.chunk, kind.head_dim), dtype)
        shapes = jax.eval_shape(lambda x: (self.packed(x, 2), self.packed(x, 3)), chunk)
        chunks = -(-capacity // self.chunk)
        return jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], chunks, *x.shape[2:]), x.dtype), shapes)

    def read(self, body, folded):
        flat = lambda x: x.reshape(*x.shape[:2], -1, x.shape[-1])
        key, value = (flat(self.restored(part, axis)) for part, axis in zip(body, (3, 4), strict=True))
        return key, value, jnp.arange(key.shape[2])[None] < folded[:, None]

    def begin(self, bodies, prompts, folded, lengths):
        return tuple(self._begin(body, prompt) for body, prompt in zip(bodies, prompts, strict=True))

    def _begin(self, body, prompt):
        chunks = body[0].codes.shape[2]

        def cut(x):
            size = chunks * self.chunk
            x = jnp.pad(x[:, :, :size], ((0, 0), (0, 0), (0, max(size - x.shape[2], 0)), (0, 0)))
            return x.reshape(*x.shape[:2], chunks, self.chunk, x.shape[3])

        return self.packed(cut(prompt.key), 3), self.packed(cut(prompt.value), 4)

    def fold(self, bodies, layers, folded):
        put = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_index_in_dim(old, new, at, 1))
        return tuple(
            jax.tree.map(
                lambda old, new: put(old, new, folded // self.chunk),
                body,
                (self.packed(layer.key, 2), self.packed(layer.value, 3)),
            )
            for body, layer in zip(bodies, layers, strict=True)
        )

    def packed(self, x: Array, axis: int) -> Geared:
        """Packs matrices `[..., g, H]` with vectors along `axis`.

        Scales and factors are float16; for 16 bits they are float32, since their steps are finer than float16 resolves.
        Outliers have the type of `x`.
        """
        kind, least_scale = (jnp.float32, 1e-30) if self.bits == 16 else (jnp.float16, 1e-6)
        whole, plain = x, x.astype(jnp.float32)
        half = max(round(self.outliers * x.shape[axis] / 2), 1) if self.outliers else 0
        order = jnp.argsort(plain, axis=axis)
        cut = lambda begin, end: jax.lax.slice_in_dim(order, begin, end, axis=axis)
        size = x.shape[axis]
        places = jnp.concatenate([cut(0, half), cut(size - half, size)], axis=axis)
        mean = jnp.broadcast_to(plain.mean(axis=axis, keepdims=True), plain.shape)
        plain = _put(plain, places, jnp.take_along_axis(mean, places, axis=axis), axis)
        least, most = plain.min(axis=axis, keepdims=True), plain.max(axis=axis, keepdims=True)
        least = least.astype(kind)
        scale = jnp.maximum((most - least) / (2**self.bits - 1), least_scale).astype(kind)
        codes = jnp.clip(jnp.round((plain - least) / scale.astype(jnp.float32)), 0, 2**self.bits - 1)
        error = plain - (codes * scale + least)
        left, right = _low_rank(error, self.rank)
        values = jnp.take_along_axis(whole, places, axis=axis)
        return Geared(
            _bits(codes, self.bits),
            scale,
            least,
            left.astype(kind),
            right.astype(kind),
            values,
            places.astype(jnp.int16),
        )

    def restored(self, part: Geared, axis: int) -> Array:
        """Restores packed matrices; the arrays of `part` may have further leading axes."""
        plain = _numbers(part.codes, self.bits) * part.scale.astype(jnp.float32) + part.least
        plain = plain + jnp.einsum("...gr,...hr->...gh", part.left, part.right, preferred_element_type=jnp.float32)
        return _put(plain.astype(part.values.dtype), part.places.astype(jnp.int32), part.values, axis)


def _put(x: Array, places: Array, values: Array, axis: int) -> Array:
    return jnp.put_along_axis(x, places, values, axis=axis, inplace=False) if places.shape[axis] else x


def _low_rank(error: Array, rank: int) -> tuple[Array, Array]:
    """Factors `[..., g, r]` and `[..., H, r]` of a product near matrices `[..., g, H]`, by power iteration."""
    right = jax.random.uniform(jax.random.key(0), (error.shape[-1], rank))
    right = jnp.broadcast_to(right, (*error.shape[:-2], *right.shape))
    left = jnp.zeros((*error.shape[:-1], rank))
    for i in range(ITERATIONS if rank else 0):
        last = i == ITERATIONS - 1
        left = error @ (jnp.linalg.qr(right)[0] if last else right)
        left = jnp.linalg.qr(left)[0] if last else left
        right = error.swapaxes(-1, -2) @ left
    return left, right


def _bits(codes: Array, bits: int) -> Array:
    """Packs integers `[..., H]` into bytes."""
    if bits == 16:
        return codes.astype(jnp.uint16)
    parts = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], -1, 8 // bits)
    return jnp.sum(parts << _shifts(bits, parts.ndim), axis=-1, dtype=jnp.uint8)


def _numbers(codes: Array, bits: int) -> Array:
    """The integers packed by `_bits`, as float32."""
    if bits == 16:
        return codes.astype(jnp.float32)
    parts = (codes[..., None] >> _shifts(bits, codes.ndim + 1)) & jnp.uint8(2**bits - 1)
    return parts.reshape(*codes.shape[:-1], -1).astype(jnp.float32)


def _shifts(bits: int, axes: int) -> Array:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape(*[1] * (axes - 1), -1)
