"""Sampling: parameters, warpers and noise."""

from specjax.sampling.noise import row_keys
from specjax.sampling.processors import Processor
from specjax.sampling.sampler import Sampler
from specjax.sampling.warp import warp
from specjax.sampling_params import SamplingArrays

__all__ = ["Processor", "Sampler", "SamplingArrays", "row_keys", "warp"]
