"""Cache policies of autoregressive models: what is kept of older tokens. A line per method, as they are listed."""
# isort: skip_file

from specjax.models.caches.ems import EMS as EMS
from specjax.models.caches.gear import GEAR as GEAR
from specjax.models.caches.spatten import SpAtten as SpAtten

# the contract
from specjax.models.caches.base import Layer as Layer, Old as Old, OldCache as OldCache
