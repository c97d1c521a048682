"""A diffusion decoder from its parts."""

from collections.abc import Sequence

import jax

from specjax.diffusion.block import BlockDiffusion
from specjax.diffusion.cache import Cache, NoCache
from specjax.diffusion.causal_context import CausalContext
from specjax.diffusion.common import check_whole_blocks
from specjax.diffusion.decoder import DiffusionDecoder
from specjax.diffusion.unmask import Threshold, Unmask
from specjax.diffusion.window import WindowDiffusion
from specjax.lm import LM, check_both_ways
from specjax.sharding.mesh import make_mesh


def diffusion(
    target: LM, mask_id: int, policy: Unmask | None = None, cache: Cache | None = None, *, block_length: int = 32,
    shift: bool = False, cfg_scale: float = 0.0, causal_blocks: bool = False, sub_block: int = 0, align: str = "text",
    reordered: bool = False, causal_context: bool = False,
    mesh: jax.sharding.Mesh | None = None, never: Sequence[int] = (), doubted: Sequence[int] = (), warped: bool = False,
) -> DiffusionDecoder:  # fmt: skip
    """A masked-diffusion decoder from its parts.

    Args:
      target: the model.
      mask_id: see `DiffusionDecoder`.
      policy: what to commit; None is `Threshold()`.
      cache: what to recompute; None recomputes everything.
      block_length: see `DiffusionDecoder`.
      shift: see `DiffusionDecoder`.
      cfg_scale: see `DiffusionDecoder`.
      causal_blocks: whether the model's blocks do not see later ones (`BlockDiffusion`).
      sub_block: see `BlockDiffusion`.
      align: see `BlockDiffusion`.
      reordered: whether the model reads causally, with its masks after all known tokens (`WindowDiffusion`).
      causal_context: whether known tokens are read causally (`CausalContext`); then `align` is `prompt_end`.
      mesh: see `DiffusionDecoder`; one that `specjax.sharding.make_mesh` takes.
      never: see `DiffusionDecoder`.
      doubted: see `DiffusionDecoder`.
      warped: see `DiffusionDecoder`.

    Raises:
      ValueError: for a mask id outside the vocabulary, an empty block, a mesh with other axes, or parts that do not go
        together.
    """
    check_both_ways(target, "a diffusion model")
    policy = policy or Threshold()
    parts = (target, mask_id, policy, cache or NoCache(), block_length, shift, cfg_scale, make_mesh(mesh))
    parts = (*parts, tuple(never), tuple(doubted), warped)
    if causal_context:
        return CausalContext(*parts, sub_block=sub_block, align=align).checked()
    if causal_blocks and not reordered:
        return (policy.block_decoder or BlockDiffusion)(*parts, sub_block=sub_block, align=align).checked()
    for name, given in (("sub_block", sub_block), ("align", align != "text")):
        if given:
            raise ValueError(f"{name} is for models whose blocks do not see later ones (causal_blocks)")
    check_whole_blocks(target, 0)
    return (WindowDiffusion if reordered else policy.decoder or DiffusionDecoder)(*parts).checked()
