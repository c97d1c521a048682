"""Masked-diffusion decoding: blocks of a canvas are unmasked in parallel, behind the same `init`/`step` pair."""

from specjax.diffusion.assd import AnySubset, Assd, AssdInfo, AssdState
from specjax.diffusion.block import BlockDiffusion, BlockState
from specjax.diffusion.cache import Cache, Delayed, Dual, Freeze, Greedy, Interval, NoCache, Prefix, Vicinity
from specjax.diffusion.canvas import CanvasDiffusion, CanvasInfo, CanvasLM, CanvasState
from specjax.diffusion.decoder import Diffusion, DiffusionInfo, DiffusionState
from specjax.diffusion.free_dave import FreeDave
from specjax.diffusion.guided import Guided, GuidedState
from specjax.diffusion.make import diffusion
from specjax.diffusion.renoise import EntropyRenoise
from specjax.diffusion.unmask import (
    Credit,
    Dream,
    EndOfText,
    EntropyBound,
    Factor,
    Fixed,
    Hierarchy,
    Learn2PD,
    LocalLeap,
    Prophet,
    ReMDM,
    RunningConfidence,
    SlowFast,
    Threshold,
    Unmask,
)
from specjax.diffusion.wino import Wino

__all__ = [
    "AnySubset",
    "Assd",
    "AssdInfo",
    "AssdState",
    "BlockDiffusion",
    "BlockState",
    "Cache",
    "CanvasDiffusion",
    "CanvasInfo",
    "CanvasLM",
    "CanvasState",
    "Credit",
    "Delayed",
    "Dream",
    "Diffusion",
    "DiffusionInfo",
    "DiffusionState",
    "Dual",
    "EndOfText",
    "EntropyBound",
    "EntropyRenoise",
    "Factor",
    "Fixed",
    "FreeDave",
    "Freeze",
    "Greedy",
    "Guided",
    "GuidedState",
    "Hierarchy",
    "Interval",
    "Learn2PD",
    "LocalLeap",
    "NoCache",
    "Prefix",
    "Prophet",
    "ReMDM",
    "RunningConfidence",
    "SlowFast",
    "Threshold",
    "Unmask",
    "Vicinity",
    "Wino",
    "diffusion",
]
