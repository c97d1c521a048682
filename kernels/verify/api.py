"""The one door to the Gumbel argmax: picks an implementation."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from specjax.kernels.verify import xla

Implementation = Literal["xla", "pallas", "pallas_tpu_interpreted"]


def gumbel_argmax(
    scores: jax.Array,
    keys: jax.Array,
    which: jax.Array,
    noisy: jax.Array,
    *,
    columns: jax.Array | None = None,
    block: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The argmax over the vocabulary of `scores + g`, where every node's Gumbel vector g comes from a key it names.

    With scores = log p this draws from p (the Gumbel-max trick). No noise of shape `[B, N, V]` is made, and that of a token
    does not depend on blocks, meshes or the other nodes: entry i of key k is `jax.random.gumbel(k, (V,), float32)[i]`.

    Args:
      scores: `[B, N, V]` float32, warped; -inf removes a token.
      keys: `[B, C]` typed threefry keys of the draws, such as those of the depths of a tree.
      which: `[B, N]` int32 in [0, C), each node's key.
      noisy: `[B]` bool; the others take the argmax of their scores alone.
      columns: `[V]` int32, the token ids of the columns, for a head over some of the vocabulary; None: they are ids.
      block: columns read at a time; None lets the implementation choose. It never changes the result.
      implementation: `xla`, or the TPU kernel, `pallas`, which runs on one device (on a mesh, call `partial_argmax` inside
        `shard_map`). None is `xla`. `pallas_tpu_interpreted` is the kernel in an interpreter: slow, for tests.

    Returns:
      The index of the winning column `[B, N]` int32 and its score `[B, N]` float32, noise included. The lowest index wins a
      tie; it is -1 where the largest score is not finite. NaN counts as inf.

    Raises:
      ValueError: on an unknown implementation, or keys that are not threefry's.
    """
    index, peak = partial_argmax(
        scores, keys, which, noisy, columns=columns, block=block, implementation=implementation
    )
    return jnp.where(jnp.isfinite(peak), index, -1), peak


def partial_argmax(
    scores: jax.Array,
    keys: jax.Array,
    which: jax.Array,
    noisy: jax.Array,
    *,
    columns: jax.Array | None = None,
    block: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`gumbel_argmax` of part of a vocabulary, whose token ids are `columns`: a column for every score, finite or not.

    Parts are put together by `merge` of their indices, made those of the whole, and their scores.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"gumbel_argmax has no implementation {implementation!r}; choose 'xla', 'pallas' or None")
    if str(jax.random.key_impl(keys)) != "threefry2x32":
        raise ValueError(f"gumbel_argmax needs threefry2x32 keys, not {jax.random.key_impl(keys)}")
    operands = scores, jax.random.key_data(keys), which, noisy, columns
    if implementation in (None, "xla"):
        return xla.argmax(*operands, block=block)
    from specjax.kernels.verify import tpu  # Pallas takes long to import

    return tpu.argmax(*operands, block=block, interpret=implementation == "pallas_tpu_interpreted")
