"""Expanders: from a drafter's next-token laws to a tree."""

from specjax.expand.base import Expander, Level
from specjax.expand.chain import Chain
from specjax.expand.early_stop import EarlyStop
from specjax.expand.static import Static
from specjax.expand.top_k import TopK

__all__ = ["Chain", "EarlyStop", "Expander", "Level", "Static", "TopK"]
