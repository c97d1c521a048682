"""Cache policies of autoregressive models for older tokens: one line per method, in the order of listings."""
# isort: skip_file

from specjax.models.caches.ems import EMS as EMS
from specjax.models.caches.gear import GEAR as GEAR
from specjax.models.caches.spatten import SpAtten as SpAtten

# the contract
from specjax.models.caches.base import Layer as Layer, Old as Old, OldCache as OldCache, Whole as Whole
from specjax.models.caches.prompt import PromptCache as PromptCache
