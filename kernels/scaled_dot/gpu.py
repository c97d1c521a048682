"""Products by groups of inputs on an NVIDIA GPU: Triton programs that widen a tile of values in registers and scale its sums.

XLA writes the product of every group to main memory, which takes longer than reading the matrix of few bits. Two int4
neighbours along the outputs share a byte. A program multiplies with the lower and the upper halves, and writes both
results interleaved.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.precision import is_usual
from specjax.kernels.scaled_dot.codes import decoded

TILE = (16, 64)
"""The fewest and the most rows of a program; tensor cores take no fewer than 16."""
COLUMNS = 64
"""Outputs of a program."""
DEPTH = (16, 64)
"""The fewest and the most inputs that a program reads at a time, a power of two that divides a group."""
SHARES, TRAFFIC = 8, 8
"""The most programs that share an output's inputs, and by how much their sums must be fewer bytes than the matrix."""


def _as_it_is(codes):
    return codes


def _signed(codes):
    """int4."""
    return (codes << 28) >> 28


def _e2m1(codes):
    """float4: a sign, two bits of exponent and one of fraction."""
    below = codes & 7
    twice = jnp.where(below < 4, below, jnp.where(below < 6, 2 * below - 4, 4 * below - 16))
    return jnp.where(codes < 8, twice, -twice).astype(jnp.float32) * 0.5


def _float(scale):
    """Scales in float32; bytes are exponents of two with float32's bias."""
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


_HALVES = {
    jnp.dtype(jnp.int4): _signed,
    jnp.dtype(jnp.uint4): _as_it_is,
    jnp.dtype(jnp.float4_e2m1fn): _e2m1,
}
"""Types with two values per byte, and functions from their codes, which are int32, to numbers."""


def takes(values: jax.Array, scale: jax.Array) -> bool:
    """Whether the kernel supports such groups."""
    whole = (values.shape[0] // scale.shape[0]) % DEPTH[0] == 0
    return whole and (values.dtype == jnp.int8 or (values.dtype in _HALVES and values.shape[1] % 2 == 0))


def shares(rows: int, groups: int, stored: int) -> int:
    """How many programs share an output's inputs, whole groups each. One program for all has too few bytes on their way at
    once; the sums of many are written and read again.

    >>> [shares(rows, 32, 2048) for rows in (1, 4, 8, 16, 128)], shares(1, 6, 2048)
    ([8, 8, 4, 2, 1], 2)

    Args:
      rows: M.
      groups: G.
      stored: bytes of an output's values.
    """
    fits = lambda count: groups % count == 0 and 8 * rows * count * TRAFFIC <= stored
    return max(count for count in (1, 2, 4, SHARES) if count == 1 or fits(count))


def dot(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    table: tuple[float, ...] = (),
    *,
    group: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `api.scaled_dot`, and with a `group` `api.scaled_dot_of`. `interpret` runs it on any platform, slowly."""
    (rows, inputs), (groups, outputs) = x.shape, scale.shape
    each = 2 if values.dtype in _HALVES else 1  # values per byte
    numbers = functools.partial(decoded, table=table, dtype=x.dtype) if table else _HALVES.get(values.dtype, _as_it_is)
    tile = min(max(pl.next_power_of_2(rows), TILE[0]), TILE[1])
    matrices = values[None] if group is None else values
    pairs = matrices.reshape(len(matrices), inputs, -1, 2)
    if scale.dtype == jnp.float8_e8m0fnu:  # Triton lacks this type
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    bytes_ = jax.lax.bitcast_convert_type(pairs, jnp.int8) if each == 2 else matrices
    parts = shares(rows, groups, inputs // each)
    out = pl.pallas_call(
        functools.partial(_kernel, tile=tile, numbers=numbers),
        out_shape=jax.ShapeDtypeStruct((parts, rows, outputs // each, each), jnp.float32),
        grid=(pl.cdiv(outputs, COLUMNS), pl.cdiv(rows, tile), parts),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="scaled_dot",
    )(x, bytes_, scale.reshape(groups, -1, each), jnp.zeros(1, jnp.int32) if group is None else group.reshape(1))
    return out.sum(axis=0).reshape(rows, outputs)


def _kernel(x_ref, values_ref, scale_ref, which_ref, out_ref, *, tile, numbers):
    """x `[M, E]`, values `[X, E, F / each]` bytes, scale `[G, F / each, each]`, which `[1]`, out `[P, M, F / each, each]`,
    the sums over each of P parts of the inputs."""
    rows, inputs = x_ref.shape
    groups, width, each = scale_ref.shape
    size, wide = inputs // groups, COLUMNS // each
    depth = next(n for n in (64, 32, 16) if size % n == 0)
    columns, lines = pl.ds(pl.program_id(0) * wide, wide), pl.ds(pl.program_id(1) * tile, tile)
    kept = columns.start + jax.lax.iota(jnp.int32, wide) < width
    own = lines.start + jax.lax.iota(jnp.int32, tile) < rows
    which, share = triton.load(which_ref.at[jnp.int32(0)]), pl.program_id(2)
    count = groups // out_ref.shape[0]
    precision = jax.lax.Precision.DEFAULT if is_usual() else jax.lax.Precision.HIGHEST

    def product(a, b):
        return jax.lax.dot(a, numbers(b).astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)

    def halves(packed):
        if each == 1:
            return (packed,)
        packed = packed.astype(jnp.int32)
        return packed & 15, packed >> 4 & 15

    def group(i, totals):
        g = share * count + i

        def part(i, sums):
            deep = pl.ds(g * size + i * depth, depth)
            a = triton.load(x_ref.at[lines, deep], mask=own[:, None], other=jnp.zeros((), x_ref.dtype))
            packed = triton.load(values_ref.at[which, deep, columns], mask=kept[None], other=jnp.zeros((), jnp.int8))
            return tuple(total + product(a, b) for total, b in zip(sums, halves(packed), strict=True))

        sums = jax.lax.fori_loop(0, size // depth, part, (nothing,) * each)
        scales = [
            triton.load(scale_ref.at[g, columns, jnp.int32(n)], mask=kept, other=jnp.zeros((), scale_ref.dtype))
            for n in range(each)
        ]
        return tuple(t + s * _float(w)[None] for t, s, w in zip(totals, sums, scales, strict=True))

    nothing = jnp.zeros((tile, wide), jnp.float32)
    totals = jax.lax.fori_loop(0, count, group, (nothing,) * each)
    for n, total in enumerate(totals):
        triton.store(out_ref.at[share, lines, columns, jnp.int32(n)], total, mask=own[:, None] & kept[None])
