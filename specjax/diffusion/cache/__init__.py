"""Cache policies: what a pass over the canvas computes anew."""

from specjax.diffusion.cache.base import Cache, Canvas
from specjax.diffusion.cache.delayed import Delayed, Greedy
from specjax.diffusion.cache.dual import Dual, Prefix
from specjax.diffusion.cache.freeze import Freeze
from specjax.diffusion.cache.interval import Interval, Vicinity
from specjax.diffusion.cache.none import NoCache

__all__ = ["Cache", "Canvas", "Delayed", "Dual", "Freeze", "Greedy", "Interval", "NoCache", "Prefix", "Vicinity"]
