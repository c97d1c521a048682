"""An engine whose drafter has devices of its own, beside those of the target."""

from collections.abc import Sequence
from typing import Any

import jax

from specjax.pipelined import pipelined
from specjax.serve.disaggregated import disjoint
from specjax.serve.engine import Engine
from specjax.serve.request import Request
from specjax.speculative import Speculative


class PipelinedEngine(Engine):
    """An engine whose drafter and target work on meshes of their own (`specjax.pipelined.Pipelined`).

    Texts are those of an engine with `mesh` alone, in float32 up to near-ties.
    """

    def __init__(self, model: Any = None, decode: Any = None, *, mesh: Any, draft_mesh: Any, **options: Any):
        """
        Args:
          model: see `Engine`.
          decode: see `Engine`.
          mesh: of the devices that hold the target; a line such as `"model=4"` takes the first ones.
          draft_mesh: of the devices that draft; a line takes those that follow.
          **options: see `Engine`.

        Raises:
          ValueError: if the meshes share a device; for a prefix cache; for a way to decode without a drafter, or with one
            that reads its target's cache; and as `Engine`.
        """
        if options.get("prefix_cache") is not None:
            raise ValueError("a drafter on a mesh of its own reads every prompt as a whole: leave the prefix cache out")
        mesh, draft_mesh = disjoint(mesh, draft_mesh, "draft_mesh")
        super().__init__(model, decode, mesh=mesh, **options)
        if type(self.decoder) is not Speculative:
            raise ValueError(f"{self._how} has no drafter for a mesh of its own: leave the draft mesh out")
        self.decoder, self.params = pipelined(self.decoder, self.params, draft_mesh)

    def shared_prefix(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """See `Engine.shared_prefix`; it is refused.

        Raises:
          ValueError: always.
        """
        raise ValueError("a drafter on a mesh of its own reads every prompt as a whole: leave the shared prefix out")

    def update(self, params: Any) -> None:
        """See `Engine.update`; what the drafter reads of these parameters goes to its mesh."""
        super().update(params)
        moved = lambda old, new: None if old is None else jax.device_put(new, old.sharding)
        beside = jax.tree.map(moved, self.params["beside"], params, is_leaf=lambda leaf: leaf is None)
        self.params = {**self.params, "beside": beside}
