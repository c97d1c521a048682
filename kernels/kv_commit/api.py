"""The entry point of the cache write, which chooses an implementation."""

import functools
from collections.abc import Sequence
from typing import Literal, get_args

import jax

from specjax.kernels.kv_commit import lowered, sharded

Implementation = Literal["xla", "pallas", "pallas_tpu_interpreted"]


def kv_commit(
    caches: Sequence[jax.Array],
    news: Sequence[jax.Array],
    src: jax.Array | None,
    dst: jax.Array,
    *,
    positions: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """The caches with the slots `src` of a block's keys or values written at `dst`; in place if they are donated.

    By default, TPUs use the kernel for supported caches, those of one shape and type at a time, and one pass over all
    scales for runs of up to 64. Otherwise `xla` is used, which touches only the written slots, but on TPUs row after
    row. `xla` is also used under `jax.vmap`, and on several devices whose mesh is unknown or has explicit axes.

    The ambient mesh tells how the caches are split (`specjax.sharding.RULES`); each device writes its part. Without a
    mesh, wrap `pallas` in `shard_map` on several devices.

    In the shape descriptions `T` denotes the block's slots, `M` the written slots, `S` the cache's slots.

    Args:
      caches: `[B, K, S, H]` each, the keys and values of some layers, or `[B, K, S]`, their scales. For `pallas`, all
        have one shape and type, with H.
      news: as many, `[B, T, K, H]` or `[B, T, K]`; cast to the caches' type.
      src: `[B, M]` int32, clipped to the block; None: all of it in order, M = T.
      dst: `[B]` int32 starts one run of M slots per row (moved back into the cache where it would leave it), or
        `[B, M]` int32 names every slot, and those out of range are dropped. Negative ones count from the end. Named
        slots must differ.
      positions: for rings, whose slot p mod S holds position p: the number of positions. `dst` then names positions,
        and those out of range are dropped; no two of a row may share a slot.
      implementation: `xla`, or the TPU kernel, `pallas`, which writes runs of all these caches in one call.
        `pallas_tpu_interpreted` is the kernel in an interpreter: slow, for tests. None chooses when a program is
        lowered, see above.

    Raises:
      ValueError: on an unknown implementation, on a run longer than the cache, or if the kernel does not support these
        operands.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"kv_commit has no implementation {implementation!r}; choose 'xla', 'pallas' or None")
    for cache, new in zip(caches, news, strict=True):
        count = (new if src is None else src).shape[1]
        if (dst.ndim == 1 or positions is not None) and count > cache.shape[2]:
            raise ValueError(f"kv_commit cannot write runs of {count} slots into a cache of {cache.shape[2]}")
    given = tuple(caches), tuple(news), src, dst
    if implementation is None:
        way = jax.custom_jvp(functools.partial(lowered.commit, positions=positions))
        by_xla = functools.partial(sharded.commit, positions=positions)
        way.defjvp(lambda primals, tangents: jax.jvp(by_xla, primals, tangents))
        return way(*given)
    if implementation == "xla":
        return sharded.commit(*given, positions)
    from specjax.kernels.kv_commit import tpu  # Pallas takes long to import

    why = tpu.refusal(sharded.part(caches[0]), *given)
    if why is not None:
        raise ValueError(f"the TPU kernel of kv_commit cannot be used: {why}; choose 'xla' or None")
    interpret = implementation == "pallas_tpu_interpreted"
    return sharded.by_kernel(functools.partial(tpu.commit, interpret=interpret), *given, positions)
