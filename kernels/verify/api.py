"""The entry point of the Gumbel argmax, which chooses an implementation."""

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
    """The argmax over the vocabulary of `scores + g`, where each node's key gives its Gumbel vector g.

    With scores = log p, this draws from p (the Gumbel-max trick). No noise array of shape `[B, N, V]` is made. A
    token's noise does not depend on blocks, meshes or other nodes: entry i for key k is
    `jax.random.gumbel(k, (V,), float32)[i]`.

    Args:
      scores: `[B, N, V]` float32, warped; -inf removes a token.
      keys: `[B, C]` typed threefry keys of the draws, for example one per depth of a tree.
      which: `[B, N]` int32 in [0, C), each node's key.
      noisy: `[B]` bool; other rows take the argmax of their scores without noise.
      columns: `[V]` int32, the token ids of the columns, for a head over a part of the vocabulary; None: columns are
        ids.
      block: columns read at a time; None lets the implementation choose. It never changes the result.
      implementation: `xla`, or the TPU kernel, `pallas`, which runs on one device (on a mesh, call `partial_argmax` inside
        `shard_map`). None is `xla`. `pallas_tpu_interpreted` is the kernel in an interpreter: slow, for tests.

    Returns:
      The index of the winning column `[B, N]` int32 and its score `[B, N]` float32, noise included. The lowest index
      wins a tie. The index is -1 if the largest score is not finite. NaN counts as inf.

    Raises:
      ValueError: on an unknown implementation, or keys that are not threefry keys.
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
    """`gumbel_argmax` over a part of the vocabulary with token ids `columns`: always a column, finite or not.

    `merge` combines parts, from their scores and their indices within the whole vocabulary.
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
