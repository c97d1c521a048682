"""The entry point of the gated delta rule, which chooses an implementation when a program is lowered."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.kernels.delta_rule import xla
from specjax.kernels.gpu import has_triton
from specjax.kernels.products import by_platform
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import partition

Array = jax.Array
Implementation = Literal["xla", "pallas_tpu_interpreted", "pallas_gpu_interpreted"]


def delta_rule(
    query: Array, key: Array, value: Array, strength: Array, log_decay: Array, seen: Array, sums: Array,
    past: tuple[Array, Array, Array] | None = None, *, implementation: Implementation | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Outputs and corrections of a block's tokens by the gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    A token shrinks the state S of its ancestors by e^g, corrects it by `d = beta (v - k S)`, adds `k^T d`, and reads `q S`. All
    tokens of a block are solved at once, by forward substitution. The state is read, not written. Arrays are float32.

    Shapes: `B` rows, `T` block tokens, `P` tokens before the block, `N` key heads, `R` value heads of each, `K` key
    channels, `V` value channels.

    Args:
      query: `[B, T, N, K]`, scaled.
      key: `[B, T, N, K]`.
      value: `[B, T, N, R, V]`.
      strength: `[B, T, N, R]`, beta.
      log_decay: `[B, T, N, R]`, g.
      seen: `[B or 1, T, P + T]` bool, a token's ancestors and itself; ancestors come first.
      sums: `[B, N, R, K, V]`, S of the committed text.
      past: keys `[B, P, N, K]`, corrections `[B, P, N, R, V]` and `log_decay` `[B, P, N, R]` of the tokens before the block.
      implementation: None decides when the program is lowered: a Pallas kernel on a TPU or an NVIDIA GPU if it supports the
        shapes, otherwise `xla`, which also has the derivatives. Other values are for tests: the kernels in an interpreter.

    Returns:
      Outputs and corrections d, `[B, T, N, R, V]` each.

    Raises:
      ValueError: on an unknown implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"delta_rule has no implementation {implementation!r}; choose 'xla' or None")
    size = query.shape[1]
    given = operands(query, key, value, strength, log_decay, seen, sums, past)
    made = _WAYS[implementation](*given)[..., seen.shape[2] - size : seen.shape[2], :]
    outputs, corrections = jnp.moveaxis(made, 4, 2)
    return outputs, corrections


def operands(query, key, value, strength, log_decay, seen, sums, past) -> tuple[Array, ...]:
    """What implementations read: heads first, and the tokens before the block as rows like others, A = P + T in all.

    Returns:
      query and key `[B, N, A, K]`, value `[B, N, R, A, V]`, strength and log_decay `[B, N, R, 1, A]`, known
      `[B, N, R, A, V]` (the corrections of tokens before the block), seen `[B or 1, A, A]` float32, and sums. A token
      before the block has strength 0 and sees nothing.
    """
    before = seen.shape[2] - query.shape[1]
    keys, known, logs = past or (key[:, :0], value[:, :0], log_decay[:, :0])
    empty = lambda x: jnp.pad(x, ((0, 0), (before, 0), *[(0, 0)] * (x.ndim - 2)))
    by_head = lambda x: jnp.moveaxis(x, 1, -2)
    one_row = lambda x: jnp.moveaxis(x, 1, -1)[..., None, :]
    known = jnp.pad(known, ((0, 0), (0, query.shape[1]), *[(0, 0)] * 3))
    return (
        by_head(empty(query)), by_head(jnp.concatenate([keys, key], axis=1)), by_head(empty(value)),
        one_row(empty(strength)), one_row(jnp.concatenate([logs, log_decay], axis=1)), by_head(known),
        jnp.pad(seen, ((0, 0), (before, 0), (0, 0))).astype(jnp.float32), sums,
    )  # fmt: skip


def padded(kernel, *given: Array, **options) -> Array:
    """A kernel's results, for A tokens, with as many rows as it wants."""
    size = given[0].shape[2]
    more = kernel.rounded(size) - size
    axes = ((2,), (2,), (3,), (4,), (4,), (3,), (1, 2), ())
    pad = lambda x, own: jnp.pad(x, [(0, more if i in own else 0) for i in range(x.ndim)])
    return kernel.attend(*map(pad, given, axes), **options)[..., :size, :]


def _of(kernel, *given: Array) -> Array:
    taken = kernel.takes(kernel.rounded(given[0].shape[2]), given[-1].shape)
    return padded(kernel, *given) if taken else xla.attend(*given)


def _tpu(*given: Array) -> Array:
    from specjax.kernels.delta_rule import tpu  # Pallas takes long to import

    return _of(tpu, *given)


def _cuda(*given: Array) -> Array:
    if not has_triton():
        return xla.attend(*given)
    from specjax.kernels.delta_rule import gpu

    return _of(gpu, *given)


def _tpu_interpreted(*given: Array) -> Array:
    from specjax.kernels.delta_rule import tpu

    return padded(tpu, *given, interpret=True)


def _gpu_interpreted(*given: Array) -> Array:
    from specjax.kernels.delta_rule import gpu

    return padded(gpu, *given, interpret=True)


_rule = by_platform(
    "delta_rule",
    lambda *given: jax.core.ShapedArray((2, *given[2].shape), jnp.float32),
    {"tpu": _tpu, "cuda": _cuda},
    xla.attend,
)
AXES = (("batch", "state_heads"),) * 6 + (("batch",), ("batch", "state_heads"))
"""Logical axes of the first dimensions of every operand."""


@jax.custom_vjp
def _chosen(*given: Array) -> Array:
    """The operation on the ambient mesh: every device computes its own rows and heads."""
    mesh = known_mesh()
    if mesh is None:
        return _rule(*given)
    whole = (axes + (None,) * (x.ndim - len(axes)) for axes, x in zip(AXES, given, strict=True))
    places = tuple(partition(mesh, axes, x.shape, {}) for axes, x in zip(whole, given, strict=True))
    return jax.shard_map(_rule, mesh=mesh, in_specs=places, out_specs=PartitionSpec(None, *places[2]), check_vma=False)(
        *given
    )


_chosen.defvjp(
    lambda *given: (_chosen(*given), given),
    lambda given, above: jax.vjp(xla.attend, *given)[1](above),
)
_WAYS = {
    None: _chosen,
    "xla": xla.attend,
    "pallas_tpu_interpreted": _tpu_interpreted,
    "pallas_gpu_interpreted": _gpu_interpreted,
}
