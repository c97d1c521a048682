"""The bytes that go over a link when keys move and when queries move."""

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes over the busiest link of a ring of devices, in each direction.

    Attributes:
      forth: of keys and values, or of queries.
      back: of results and their log-sum-exps; 0 if keys move.
    """

    forth: int
    back: int

    @property
    def longest(self) -> int:
        """Of the busier direction: a link sends and receives at once."""
        return max(self.forth, self.back)


def traffic(
    moves: str, *, tokens: int, heads: int, kv_heads: int, width: int, devices: int, is_causal: bool, size: int = 2,
    switched: bool = False,
) -> Traffic:  # fmt: skip
    """What one row of a sequence sends over a link, without the exchange of chunks before and after.

    Args:
      moves: `keys` or `queries`.
      tokens: of the sequence, queries as many as keys.
      heads: of queries on a device.
      kv_heads: of keys on a device.
      width: channels of a head.
      devices: over which the sequence is split.
      is_causal: whether early chunks of queries stop where they see nothing.
      size: bytes of a number of queries, keys and values; results and log-sum-exps have 4.
      switched: whether every pair of devices has a link of its own. In a ring, a result passes as many links as its owner is
        away.
    """
    part, hops = -(-tokens // devices), devices - 1
    if moves == "keys":
        return Traffic(hops * part * 2 * kv_heads * width * size, 0)
    # of two chunks one travels all the way; the other reaches the device `step` ahead from `devices - step` of them only
    share = lambda step: (1 + (devices - step) / devices) / 2 if is_causal else 1.0
    steps = range(1, devices)
    query, found = part * heads * width * size, part * heads * (width + 1) * 4
    away = lambda step: 1 if switched else step
    return Traffic(
        round(query * sum(map(share, steps))), round(found * sum(share(step) * away(step) for step in steps))
    )


def fewest(query: jax.Array, key: jax.Array, is_causal: bool, devices: int, switched: bool = False) -> str:
    """What to move for these arrays: `keys`, or `queries` if their busier direction has fewer bytes; see `traffic`."""
    if is_causal and query.shape[1] != key.shape[1]:
        return "keys"
    sizes = {"heads": query.shape[2], "kv_heads": key.shape[2], "width": query.shape[3], "devices": devices}
    known = {"tokens": key.shape[1], "is_causal": is_causal, "size": np.dtype(key.dtype).itemsize, "switched": switched}
    keys, queries = (traffic(moves, **sizes, **known) for moves in ("keys", "queries"))
    return "queries" if queries.longest < keys.longest else "keys"


def has_switch(mesh: Any) -> bool:
    """Whether the devices of a mesh have links to all: GPUs of a node do, and TPUs and others are taken to be a ring."""
    devices = getattr(mesh, "devices", None)  # an abstract mesh has none: then those of this program
    platform = jax.default_backend() if devices is None else devices.flat[0].platform
    return platform in ("gpu", "cuda", "rocm")
