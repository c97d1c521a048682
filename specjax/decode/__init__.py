"""Ways to decode, as objects: frozen settings without a model or arrays, for `specjax.generate(decode=...)`.

One line per way, in the order in which they are listed.
"""
# isort: skip_file

from specjax.decode.speculate import Plain as Plain
from specjax.decode.speculate import Speculate as Speculate
from specjax.decode.diffusion import Diffusion as Diffusion
from specjax.decode.any_order import AnyOrder as AnyOrder
from specjax.decode.soft_thinking import SoftThinking as SoftThinking
from specjax.decode.routing import Route as Route

# searches, each beside its decoder
from specjax.search.beam import Beam as Beam
from specjax.search.stochastic_beam import StochasticBeam as StochasticBeam
from specjax.search.superposed import Superposed as Superposed
from specjax.search.smc import Smc as Smc
from specjax.search.asap import Asap as Asap
from specjax.search.entropy_adaptive import EntropyAdaptive as EntropyAdaptive
from specjax.search.astar import AStar as AStar
from specjax.search.spec_reason import SpecReason as SpecReason
from specjax.search.speculative_thinking import SpeculativeThinking as SpeculativeThinking
from specjax.search.e_lang import ELang as ELang
from specjax.search.self_agreement import SelfAgreement as SelfAgreement
from specjax.decode.hedged import Hedged as Hedged
from specjax.search.chops import Chops as Chops
from specjax.search.x_mbr import XMbr as XMbr
from specjax.search.verbalized import Verbalized as Verbalized
from specjax.search.ralm import Ralm as Ralm
from specjax.search.plan_search import PlanSearch as PlanSearch
from specjax.search.merged_prompts import MergedPrompts as MergedPrompts
from specjax.search.coupling import HideMessage as HideMessage
from specjax.search.coupling import ReadMessage as ReadMessage

# settings that steer a model's distribution
from specjax.decode.steer import Guidance as Guidance
from specjax.decode.steer import Contrast as Contrast
from specjax.decode.steer import LayerContrast as LayerContrast
from specjax.decode.steer import ExpertContrast as ExpertContrast

# the contracts
from specjax.decoder import Decode as Decode
from specjax.decode.steer import Steer as Steer
from specjax.decode.routing import Router as Router
