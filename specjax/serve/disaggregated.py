"""Prompts are read on devices of their own, and their rows are handed over to the devices that decode.

Prefill is bound by computation and decoding by memory, so each can have the mesh that suits it. A long prompt does not hold up
the rows that decode (DistServe, Zhong et al. 2024, arXiv:2401.09670).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import decoder as decoding
from specjax import models
from specjax.sampling.noise import keys_of
from specjax.serve.engine import Engine
from specjax.serve.request import Request
from specjax.serve.slots import Served, Slots
from specjax.sharding import make_mesh
from specjax.sharding.mesh import axis_sizes, devices_of
from specjax.sharding.rules import shardings


class Reader:
    """Reads prompts with a copy of the model on a mesh of its own.

    Attributes:
      served: the model on that mesh.
      mesh: of the devices that decode.
    """

    def __init__(self, served: Served, mesh: jax.sharding.Mesh):
        self.served, self.mesh = served, mesh
        self._ahead: dict[tuple[int, bytes], Any] = {}

    def read_ahead(self, slots: Slots, requests: Sequence[Request], keys: np.ndarray, prefix: Any) -> None:
        """Begins to read the prompts of requests that enter next, and does not wait for it."""
        for request, key in zip(requests, keys, strict=True):
            if (known := (id(request), key.tobytes())) not in self._ahead:
                self._ahead[known] = self._row(slots, request, key, prefix)

    def rows(self, slots: Slots, requests: Sequence[Request], keys: np.ndarray, prefix: Any) -> list[Any]:
        """Each request's row after its prompt was read, as `decoder.row_of` returns it, on the mesh that decodes."""
        self.read_ahead(slots, requests, keys, prefix)
        decoder, read = slots.served.decoder, []
        for request, key in zip(requests, keys, strict=True):
            ready = self._ahead.pop((id(request), key.tobytes()), None)
            read.append(self._row(slots, request, key, prefix) if ready is None else ready)
        alone = lambda names: tuple(None if name == "batch" else name for name in names)
        axes = jax.tree.map(alone, decoder.axes(read[0]), is_leaf=lambda names: isinstance(names, tuple))
        return [jax.device_put(row, shardings(self.mesh, axes, row)) for row in read]

    def insert(
        self, slots: Slots, state: Any, rows: Sequence[int], requests: Sequence[Request], keys: np.ndarray, prefix: Any
    ) -> Any:
        """See `Slots.insert`."""
        read = self.rows(slots, requests, keys, prefix)
        for row, own, key in zip(rows, read, keys, strict=True):
            row, key = jax.device_put((np.int32(row), key))
            state = decoding.copy_row(slots.served.decoder, state, row, own, keys_of(key))
        return state

    def read_prefix(self, slots: Slots, ids: Any) -> Any:
        """A prefix that prompts share, on this mesh."""
        return decoding.read_prefix(self.served.decoder, self.served.params, self._own(slots).empty(), ids)[1]

    def _own(self, slots: Slots) -> Slots:
        """One row of the same sizes on this mesh."""
        return Slots(self.served, 1, slots.capacity, slots.form)

    def _row(self, slots: Slots, request: Request, key: np.ndarray, prefix: Any) -> Any:
        own = self._own(slots)
        state = own.insert(own.empty(), [0], [request], key[None], prefix)
        return decoding.row_of(self.served.decoder, state, jax.device_put(np.int32(0)))


class DisaggregatedEngine(Engine):
    """An engine that reads prompts on one mesh and decodes on another. Both hold the model.

    While rows decode, prompts that enter next are read. Texts are those of an engine with `mesh` alone, in float32 up to
    near-ties.
    """

    def __init__(self, model: Any = None, decode: Any = None, *, mesh: Any, prefill_mesh: Any, **options: Any):
        """
        Args:
          model: see `Engine`.
          decode: see `Engine`.
          mesh: of the devices that decode; a line such as `"model=4"` takes the first ones.
          prefill_mesh: of the devices that read prompts; a line takes those that follow.
          **options: see `Engine`.

        Raises:
          ValueError: if the meshes share a device or need different copies of kv-heads, or if the decoder does not read
            prompts row by row; for a prefix cache; and as `Engine`.
        """
        if options.get("prefix_cache") is not None:
            raise ValueError(
                "prompts that are read on a mesh of their own have no prefix cache: leave prefix_cache out"
            )
        mesh, prefill_mesh = disjoint(mesh, prefill_mesh)
        super().__init__(model, decode, mesh=mesh, **options)
        alone = self.model.masked is not None or self.encodes or self.writes_steps or self.decoder.num_texts > 1
        if alone or not self.decoder.reads_prefix:
            raise ValueError(f"{self._how} does not hand over rows of prompts: use an Engine with one mesh")
        own = models.load(model, options.get("dtype"), prefill_mesh)
        lm, params = models.spread(own.lm, own.params, prefill_mesh)
        copies = [getattr(one, "kv_copies", 1) for one in (self.model.lm, lm)]
        if copies[0] != copies[1]:
            raise ValueError(
                f"the mesh needs {copies[0]} copies of each kv-head and the prefill mesh {copies[1]}: give both a model axis "
                f"that divides the model's kv-heads, or both the same"
            )
        how = {name: options[name] for name in ("rows", "logprobs") if name in options}
        read_by, read_with = self.decode.bind(dataclasses.replace(own, lm=lm, params=params), mesh=prefill_mesh, **how)
        self._elsewhere = dataclasses.replace(super().served(), decoder=read_by, params=read_with, mesh=prefill_mesh)
        self._decodes_on = mesh

    def served(self) -> Served:
        return dataclasses.replace(super().served(), reader=Reader(self._elsewhere, self._decodes_on))


def disjoint(mesh: Any, other: Any, name: str = "prefill_mesh") -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """Two meshes without a common device.

    Args:
      mesh: a mesh, or a line that takes the first devices.
      other: a mesh, or a line that takes those that follow.
      name: what an error calls it.

    Raises:
      ValueError: if they share a device, or there are too few.
    """
    first = _first_of(mesh, ())
    second = _first_of(other, () if first is None else tuple(first.devices.flat))
    if first is None or second is None:
        raise ValueError(f"two parts work on two meshes: give mesh and {name}")
    if shared := set(first.devices.flat) & set(second.devices.flat):
        raise ValueError(f"the meshes share {len(shared)} devices, such as {min(shared, key=str)}: give each its own")
    return first, second


def _first_of(mesh: Any, taken: tuple[Any, ...]) -> jax.sharding.Mesh | None:
    """A mesh; a line's is over the first devices of its platform that are not taken."""
    if not isinstance(mesh, str):
        return make_mesh(mesh)
    need, free = math.prod(axis_sizes(mesh).values()), [one for one in devices_of(mesh) if one not in taken]
    if need > len(free):
        left = f"{len(free)} are left" if taken else f"there are {len(free)}"
        raise ValueError(f"mesh {mesh!r} asks for {need} devices and {left}")
    return make_mesh(mesh, free[:need])
