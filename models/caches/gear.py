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
      left: `[..., g, r]`, the left low-rank factor; in a body as wide as the greater of the two ranks.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks(Pretty):
    """A layer's keys and values, as `n` chunks.

    Attributes:
      key: leaves lead with `[B, K, n]`.
      value: as `key`.
      prompt_key: `[B, K, H, r]`, the right low-rank factor that all chunks of a prompt share.
      prompt_value: as `prompt_key`.
      of_prompt: `[B, n]` bool, the prompt's chunks, whose own right factors are not used.
    """

    key: Geared
    value: Geared
    prompt_key: Array
    prompt_value: Array
    of_prompt: Array


@dataclasses.dataclass(frozen=True)
class GEAR(Old):
    """Keeps every token in few bits, with low-rank error correction and exact outliers.

    A chunk's keys are quantised by channel and its values by token, each between the minimum and the maximum of its
    vector without outliers. The errors of a head's matrix are approximated in low rank: all those of a prompt together,
    and those of each later chunk. A step restores all chunks.

    A rank costs `16 (N + H) / (N H)` bits a number of a matrix of N tokens. So the many tokens of a prompt have the
    higher rank, as in the paper. Outliers are chosen within a chunk; the published program chooses those of a channel
    over all of a prompt.

    Attributes:
      chunk: see `Old`; the tokens of a channel that share a scale.
      bits: 2, 4, 8 or 16.
      rank: r of chunks that are folded while text is written; 0: none.
      prefill_rank: r of a prompt; 0: none.
      outliers: the share of a vector that is kept exactly, half of it the greatest numbers and half the least (at least
        one of each); 0: none (GEAR-L).
    """

    about = About(
        "gear", "all are kept in few bits, with their errors in low rank and outliers", "arXiv:2403.05527", "lossy"
    )

    chunk: int = 64
    bits: int = 4
    rank: int = 2
    prefill_rank: int = 4
    outliers: float = 0.02

    def __post_init__(self):
        if (
            self.bits not in (2, 4, 8, 16)
            or min(self.rank, self.prefill_rank) < 0
            or not 0 <= self.outliers < 1
            or self.recent < 0
            or self.chunk < 1
        ):
            raise ValueError(f"gear needs bits 2, 4, 8 or 16, ranks >= 0, outliers in [0, 1) and a chunk, got {self}")

    def init(self, config, layer, batch, capacity, dtype):
        kind = config.attention(layer)
        if kind.head_dim * self.bits % 8:
            raise ValueError(
                f"gear packs {self.bits} bits into bytes, and a head's {kind.head_dim} numbers do not fill whole bytes: "
                "choose more bits"
            )
        chunks = -(-capacity // self.chunk)
        if self.rank > min(self.chunk, kind.head_dim) or self.prefill_rank > min(chunks * self.chunk, kind.head_dim):
            raise ValueError(
                f"gear's ranks {self.rank} and {self.prefill_rank} are of matrices of {self.chunk} and up to "
                f"{chunks * self.chunk} tokens with {kind.head_dim} numbers: choose lower ranks"
            )
        heads, width = kind.num_key_value_heads, kind.head_dim
        prompt = jax.ShapeDtypeStruct((batch, heads, chunks, self.chunk, width), dtype)
        shapes = jax.eval_shape(lambda x: self._prompt(x, x, jnp.zeros((batch,), jnp.int32)), prompt)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def read(self, body, folded):
        def whole(part, shared, axis):
            shared, own = self._wide(shared)[:, :, None], self._wide(part.right)
            right = jnp.where(body.of_prompt[:, None, :, None, None], shared, own)
            restored = self.restored(dataclasses.replace(part, right=right), axis)
            return restored.reshape(*restored.shape[:2], -1, restored.shape[-1])

        key, value = whole(body.key, body.prompt_key, 3), whole(body.value, body.prompt_value, 4)
        return key, value, jnp.arange(key.shape[2])[None] < folded[:, None]

    def begin(self, bodies, prompts, folded, lengths):
        return tuple(self._begin(body, prompt, folded) for body, prompt in zip(bodies, prompts, strict=True))

    def _begin(self, body, prompt, folded):
        chunks = body.of_prompt.shape[1]
        size = chunks * self.chunk

        def cut(x):
            x = jnp.pad(x[:, :, :size], ((0, 0), (0, 0), (0, max(size - x.shape[2], 0)), (0, 0)))
            return x.reshape(*x.shape[:2], chunks, self.chunk, x.shape[3])

        return self._prompt(cut(prompt.key), cut(prompt.value), folded)

    def _prompt(self, key: Array, value: Array, folded: Array) -> Chunks:
        """A body of the first `folded` `[B]` tokens of keys and values `[B, K, n, g, H]`."""
        of_prompt = jnp.arange(key.shape[2])[None] * self.chunk < folded[:, None]

        def packed(x, axis):
            part, error = self._quantised(x, axis)
            error = jnp.where(of_prompt[:, None, :, None, None], error, 0.0)
            left, right = _low_rank(error.reshape(*x.shape[:2], -1, x.shape[4]), self.prefill_rank)
            left = left.reshape(*x.shape[:4], -1).astype(part.scale.dtype)
            own = jnp.zeros((*x.shape[:3], x.shape[4], self.rank), left.dtype)
            return dataclasses.replace(part, left=self._wide(left), right=own), right.astype(left.dtype)

        (keys, of_keys), (values, of_values) = packed(key, 3), packed(value, 4)
        return Chunks(keys, values, of_keys, of_values, of_prompt)

    def _wide(self, factor: Array) -> Array:
        """A factor with the columns of the greater rank."""
        more = max(self.rank, self.prefill_rank) - factor.shape[-1]
        return jnp.pad(factor, [(0, 0)] * (factor.ndim - 1) + [(0, more)])

    def fold(self, bodies, layers, folded):
        put = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_index_in_dim(old, new, at, 1))

        def with_chunk(old, x, axis):
            new = self.packed(x, axis)
            new = dataclasses.replace(new, left=self._wide(new.left))
            return jax.tree.map(lambda old, new: put(old, new, folded // self.chunk), old, new)

        return tuple(
            dataclasses.replace(
                body, key=with_chunk(body.key, layer.key, 2), value=with_chunk(body.value, layer.value, 3)
            )
            for body, layer in zip(bodies, layers, strict=True)
        )

    def packed(self, x: Array, axis: int) -> Geared:
        """Packs matrices `[..., g, H]` with vectors along `axis`, and their errors in `rank`."""
        part, error = self._quantised(x, axis)
        left, right = (factor.astype(part.scale.dtype) for factor in _low_rank(error, self.rank))
        return dataclasses.replace(part, left=left, right=right)

    def _quantised(self, x: Array, axis: int) -> tuple[Geared, Array]:
        """Matrices `[..., g, H]` without low-rank factors, and the errors of all numbers but the outliers, float32.

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
        error = _put(error, places, jnp.zeros(places.shape), axis)
        values = jnp.take_along_axis(whole, places, axis=axis)
        left, right = (jnp.zeros((*x.shape[:-2], size, 0), kind) for size in x.shape[-2:])
        return Geared(_bits(codes, self.bits), scale, least, left, right, values, places.astype(jnp.int16)), error

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
