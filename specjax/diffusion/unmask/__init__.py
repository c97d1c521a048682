"""Unmask policies: which of a block's predictions to commit. One file a method."""

from specjax.diffusion.unmask.base import Choice, Guess, Unmask
from specjax.diffusion.unmask.entropy import EntropyBound
from specjax.diffusion.unmask.factor import Factor
from specjax.diffusion.unmask.fixed import Fixed
from specjax.diffusion.unmask.local_leap import LocalLeap
from specjax.diffusion.unmask.threshold import Threshold

__all__ = ["Choice", "EntropyBound", "Factor", "Fixed", "Guess", "LocalLeap", "Threshold", "Unmask"]
