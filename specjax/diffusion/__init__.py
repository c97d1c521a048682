"""Masked-diffusion decoding: blocks of a canvas are unmasked in parallel, behind the same `init`/`step` pair."""

from specjax.diffusion.decoder import Diffusion, DiffusionInfo, DiffusionState, diffusion
from specjax.diffusion.unmask import EntropyBound, Factor, Fixed, LocalLeap, Threshold, Unmask

__all__ = [
    "Diffusion",
    "DiffusionInfo",
    "DiffusionState",
    "EntropyBound",
    "Factor",
    "Fixed",
    "LocalLeap",
    "Threshold",
    "Unmask",
    "diffusion",
]
