"""Unmask policies: which of a block's predictions to commit. One file a method."""

from specjax.diffusion.unmask.base import Choice, Guess, Unmask
from specjax.diffusion.unmask.credit import Credit
from specjax.diffusion.unmask.dream import Dream
from specjax.diffusion.unmask.end_of_text import EndOfText
from specjax.diffusion.unmask.entropy import EntropyBound
from specjax.diffusion.unmask.factor import Factor
from specjax.diffusion.unmask.fixed import Fixed
from specjax.diffusion.unmask.hierarchy import Hierarchy
from specjax.diffusion.unmask.learned import Learn2PD
from specjax.diffusion.unmask.local_leap import LocalLeap
from specjax.diffusion.unmask.prophet import Prophet
from specjax.diffusion.unmask.remask import ReMDM, RunningConfidence
from specjax.diffusion.unmask.slow_fast import SlowFast
from specjax.diffusion.unmask.threshold import Threshold
from specjax.diffusion.unmask.wrapper import Wrapper

__all__ = [
    "Choice",
    "Credit",
    "Dream",
    "EndOfText",
    "EntropyBound",
    "Factor",
    "Fixed",
    "Guess",
    "Hierarchy",
    "Learn2PD",
    "LocalLeap",
    "Prophet",
    "ReMDM",
    "RunningConfidence",
    "SlowFast",
    "Threshold",
    "Unmask",
    "Wrapper",
]
