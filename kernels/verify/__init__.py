"""The inner step of the coupled verifier: the argmax of scores plus Gumbel noise, which is never stored as an array."""

from specjax.kernels.verify.api import gumbel_argmax

__all__ = ["gumbel_argmax"]
