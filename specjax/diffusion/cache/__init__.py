"""Cache policies: what a pass over the canvas recomputes. One line per method, in the order in which they are listed."""
# isort: skip_file

from specjax.diffusion.cache.none import NoCache as NoCache
from specjax.diffusion.cache.dual import Prefix as Prefix
from specjax.diffusion.cache.dual import Dual as Dual
from specjax.diffusion.cache.delayed import Delayed as Delayed
from specjax.diffusion.cache.delayed import Greedy as Greedy
from specjax.diffusion.cache.freeze import Freeze as Freeze
from specjax.diffusion.cache.block_causal import BlockCausal as BlockCausal
from specjax.diffusion.cache.interval import Interval as Interval
from specjax.diffusion.cache.interval import Vicinity as Vicinity

# the contract
from specjax.diffusion.cache.base import Cache as Cache, Canvas as Canvas
