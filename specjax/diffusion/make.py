"""A diffusion decoder from its parts."""

from collections.abc import Sequence

import jax

from specjax.diffusion.block import BlockDiffusion
from specjax.diffusion.cache import Cache, NoCache
from specjax.diffusion.decoder import Diffusion
from specjax.diffusion.unmask import Threshold, Unmask
from specjax.lm import LM
from specjax.sharding.mesh import make_mesh


def diffusion(
    target: LM, mask_id: int, policy: Unmask | None = None, cache: Cache | None = None, *, block_length: int = 32,
    shift: bool = False, cfg_scale: float = 0.0, causal_blocks: bool = False, sub_block: int = 0, align: str = "text",
    mesh: jax.sharding.Mesh | None = None, never: Sequence[int] = (), doubted: Sequence[int] = (), warped: bool = False,
) -> Diffusion:  # fmt: skip
    """A masked-diffusion decoder from its parts.

    Args:
      target: the model.
      mask_id: see `Diffusion`.
      policy: what to commit; None is `Threshold()`.
      cache: what to compute anew; None is everything.
      block_length: see `Diffusion`.
      shift: see `Diffusion`.
      cfg_scale: see `Diffusion`.
      causal_blocks: whether the model's blocks do not see later ones (`BlockDiffusion`).
      sub_block: see `BlockDiffusion`.
      align: see `BlockDiffusion`.
      mesh: see `Diffusion`; one that `specjax.sharding.make_mesh` takes.
      never: see `Diffusion`.
      doubted: see `Diffusion`.
      warped: see `Diffusion`.

    Raises:
      ValueError: on a mask id outside the vocabulary, an empty block, a mesh of other axes, or parts that do not go together.
    """
    policy = policy or Threshold()
    parts = (target, mask_id, policy, cache or NoCache(), block_length, shift, cfg_scale, make_mesh(mesh))
    parts = (*parts, tuple(never), tuple(doubted), warped)
    if causal_blocks:
        return (policy.block_decoder or BlockDiffusion)(*parts, sub_block=sub_block, align=align).checked()
    for name, given in (("sub_block", sub_block), ("align", align != "text")):
        if given:
            raise ValueError(f"{name} is for models whose blocks do not see later ones (causal_blocks)")
    return (policy.decoder or Diffusion)(*parts).checked()
