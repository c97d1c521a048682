"""Sampling: parameters, warpers and noise."""

from specjax.sampling.noise import row_keys
from specjax.sampling.params import Sampling
from specjax.sampling.processors import Processor
from specjax.sampling.sampler import Sampler
from specjax.sampling.warp import warp

__all__ = ["Processor", "Sampler", "Sampling", "row_keys", "warp"]
