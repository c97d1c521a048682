"""Held-out text: its evaluation at every checkpoint, and the choice of the best checkpoint."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax.objectives.base import Batch, Objective
from specjax.objectives.means import Counted, Counts, Parts, counts
from specjax.settings import settled
from specjax.sharding.ambient import under
from specjax.sharding.distributed import to_host, to_places
from specjax.sharding.rows import own_rows
from specjax.train.data import stacked

Array = jax.Array
PyTree = Any


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("mesh",))
@settled
def counts_of(
    objective: Objective,
    parts: int,
    number: Array,
    choices: list[Array] | None,
    params: PyTree,
    frozen: PyTree,
    batch: Batch,
    keys: Array,
    mesh: jax.sharding.Mesh | None = None,
) -> Counts:
    """One batch's counts for the means over several batches."""
    mean = Counted(number, parts, choices)
    with under(mesh):
        objective.loss(params, frozen, batch, keys, mean)
    return mean.kept


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("mesh",))
@settled
def share_of(
    objective: Objective,
    counts: Counts,
    params: PyTree,
    frozen: PyTree,
    batch: Batch,
    keys: Array,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Array]:
    """One batch's share of the loss and the metrics over several batches."""
    mean = Parts(counts)
    with under(mesh):
        loss, metrics = objective.loss(params, frozen, batch, keys, mean)
    mean.done()
    return {"loss": loss} | {name: value for name, value in metrics.items() if name != "weight"}


def _sum(trees: Iterable[PyTree]) -> PyTree:
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out text, which is evaluated at every checkpoint.

    Attributes:
      rows: its rows, from `data.read_rows` or captured.
      batch_size: rows read at a time.
      patience: the number of checkpoints without improvement after which training ends; None: it never ends early.
    """

    rows: Any
    batch_size: int = 8
    patience: int | None = None

    def __post_init__(self):
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1 checkpoint, got {self.patience}")

    def metrics(
        self, objective: Objective, params: PyTree, frozen: PyTree, key: Array, mesh: jax.sharding.Mesh | None = None
    ) -> dict[str, float]:
        """The loss, the objective's metrics and its `merit` over the whole text as one batch, named `held_out_...`.

        Args:
          objective: the objective, in the form that `Objective.held_out` gives.
          params: the objective's.
          frozen: its `target_params`.
          key: the same at every checkpoint, so that draws are the same.
          mesh: see `fit`.
        """
        objective, frozen = objective.held_out(frozen)
        parts = -(-len(self.rows) // self.batch_size)
        keys = jax.random.split(key, (parts, self.batch_size))
        if mesh is not None:
            params = to_places(params, objective.param_shardings(mesh, params))
        models = params, frozen

        def count(choices):
            return _sum(
                counts_of(objective, parts, jnp.int32(number), choices, *models, batch, keys[number], mesh=mesh)
                for number, batch in enumerate(self._batches(mesh))
            )

        found = counts(count)
        totals = _sum(
            share_of(objective, found, *models, batch, keys[number], mesh=mesh)
            for number, batch in enumerate(self._batches(mesh))
        )
        metrics = {name: float(value) for name, value in to_host(totals).items()}
        metrics["merit"] = objective.merit(metrics)
        return {f"held_out_{name}": value for name, value in metrics.items()}

    def _batches(self, mesh: jax.sharding.Mesh | None) -> Iterator[Batch]:
        """Yields all rows in batches; the last batch is padded."""
        own = own_rows(mesh, self.batch_size)
        for begin in range(0, len(self.rows), self.batch_size):
            yield Batch.placed(stacked(self.rows, begin + own), mesh)


@dataclasses.dataclass(frozen=True)
class Best:
    """The checkpoint with the highest merit on held-out text.

    Attributes:
      step: its step; 0: there is none yet.
      merit: see `Objective.merit`.
      stale: the number of checkpoints since then.
    """

    step: int = 0
    merit: float = -math.inf
    stale: int = 0

    def after(self, step: int, merit: float) -> "Best":
        """The best checkpoint, given one more."""
        return Best(step, merit) if merit > self.merit else dataclasses.replace(self, stale=self.stale + 1)
