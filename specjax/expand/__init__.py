"""Expanders: from a drafter's next-token distributions to a tree. One line per method, in the order in which they are
listed.
"""
# isort: skip_file

from specjax.expand.chain import Chain as Chain
from specjax.expand.early_stop import EarlyStop as EarlyStop
from specjax.expand.static import Static as Static
from specjax.expand.top_k import TopK as TopK
from specjax.expand.best_first import BestFirst as BestFirst
from specjax.expand.iid import IID as IID
from specjax.expand.without_replacement import WithoutReplacement as WithoutReplacement
from specjax.expand.greedy_draft import GreedyDraft as GreedyDraft
from specjax.expand.stochastic_beam import StochasticBeam as StochasticBeam
from specjax.expand.dyspec import DySpec as DySpec

# the contract
from specjax.expand.base import Expander as Expander, Level as Level
