"""Searches, decoders that keep several texts of a prompt side by side; and selections, which take one of several completions.

One line per method, in the order in which they are listed.
"""
# isort: skip_file

from specjax.search.beam import Beam as Beam
from specjax.search.stochastic_beam import StochasticBeam as StochasticBeam
from specjax.search.superposed import Superposed as Superposed
from specjax.search.smc import Smc as Smc
from specjax.search.asap import Asap as Asap

# selections
from specjax.search.majority import Majority as Majority
from specjax.search.self_certainty import SelfCertainty as SelfCertainty
from specjax.search.borda import Borda as Borda
from specjax.search.first_finish import FirstFinish as FirstFinish
from specjax.search.reward import Reward as Reward
from specjax.search.reward import ScorerError as ScorerError

# step by step, or between two models
from specjax.search.entropy_adaptive import EntropyAdaptive as EntropyAdaptive
from specjax.search.astar import AStar as AStar
from specjax.search.spec_reason import SpecReason as SpecReason
from specjax.search.speculative_thinking import SpeculativeThinking as SpeculativeThinking
from specjax.search.e_lang import ELang as ELang
from specjax.search.self_agreement import SelfAgreement as SelfAgreement
from specjax.search.chops import Chops as Chops
from specjax.search.x_mbr import XMbr as XMbr
from specjax.search.verbalized import Verbalized as Verbalized
from specjax.search.ralm import Ralm as Ralm
from specjax.search.plan_search import PlanSearch as PlanSearch
from specjax.search.plan_search import Planned as Planned
from specjax.search.merged_prompts import MergedPrompts as MergedPrompts
from specjax.search.merged_prompts import MergedWritten as MergedWritten
from specjax.search.merged_prompts import Merger as Merger
from specjax.search.coupling import HideMessage as HideMessage
from specjax.search.coupling import ReadMessage as ReadMessage
from specjax.search.knn_lm import KnnLm as KnnLm
from specjax.search.knn_lm import KnnWritten as KnnWritten
from specjax.search.knn_lm import Entries as Entries
from specjax.search.knn_lm import build_entries as build_entries

# over any text, without decoding
from specjax.search.exact_extract import exact_extract as exact_extract
from specjax.search.exact_extract import Span as Span

# couplings of least entropy
from specjax.search.coupling import greedy_coupling as greedy_coupling
from specjax.search.coupling import bottleneck_coupling as bottleneck_coupling
from specjax.search.coupling import BottleneckCoupling as BottleneckCoupling
from specjax.search.coupling import compressed as compressed
from specjax.search.coupling import entropy as entropy
from specjax.search.coupling import mutual_information as mutual_information

# the decoders
from specjax.search.beam import BeamSearch as BeamSearch
from specjax.search.stochastic_beam import StochasticBeamSearch as StochasticBeamSearch
from specjax.search.superposed import SuperposedSearch as SuperposedSearch
from specjax.search.smc import SmcSearch as SmcSearch
from specjax.search.asap import AsapSearch as AsapSearch
from specjax.search.entropy_adaptive import EntropyAdaptiveDecoder as EntropyAdaptiveDecoder

# the contracts
from specjax.search.base import Search as Search
from specjax.search.base import SearchSettings as SearchSettings
from specjax.search.base import SearchState as SearchState
from specjax.search.base import Beams as Beams
from specjax.search.base import Found as Found
from specjax.search.selection import Selection as Selection
from specjax.search.selection import Candidate as Candidate
from specjax.search.stepwise import Stepwise as Stepwise
from specjax.search.stepwise import Step as Step
from specjax.search.stepwise import Written as Written
from specjax.search.astar import Partial as Partial
from specjax.search.astar import steps_ahead as steps_ahead
from specjax.search.spec_reason import Proposed as Proposed

# retrieval while decoding
from specjax.search.ralm import Retrieved as Retrieved
from specjax.search.ralm import Retriever as Retriever
from specjax.search.ralm import Ranks as Ranks
from specjax.search.ralm import Bm25 as Bm25
from specjax.search.ralm import Dense as Dense
from specjax.search.ralm import Faiss as Faiss
