"""The coupled verdict's inner step: the argmax of scores plus Gumbel noise that is never an array."""

from specjax.kernels.verify.api import gumbel_argmax

__all__ = ["gumbel_argmax"]
