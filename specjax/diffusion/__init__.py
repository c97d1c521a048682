"""Masked-diffusion decoding: blocks of a canvas are unmasked in parallel, with the same `init`/`step` pair.

One line per export; methods are listed in this order.
"""
# isort: skip_file

# unmask policies, including those with a decoder of their own; `specjax.diffusion.unmask` may have more
from specjax.diffusion.unmask import Threshold as Threshold
from specjax.diffusion.unmask import Fixed as Fixed
from specjax.diffusion.unmask import Sequential as Sequential
from specjax.diffusion.free_dave import FreeDave as FreeDave
from specjax.diffusion.unmask import Dream as Dream
from specjax.diffusion.unmask import Factor as Factor
from specjax.diffusion.unmask import EntropyBound as EntropyBound
from specjax.diffusion.unmask import EntropyBudget as EntropyBudget
from specjax.diffusion.unmask import LocalLeap as LocalLeap
from specjax.diffusion.unmask import Hierarchy as Hierarchy
from specjax.diffusion.unmask import SlowFast as SlowFast
from specjax.diffusion.unmask import Klass as Klass
from specjax.diffusion.unmask import LongestPrefix as LongestPrefix
from specjax.diffusion.unmask import MultiBlock as MultiBlock
from specjax.diffusion.unmask import Credit as Credit
from specjax.diffusion.unmask import Prophet as Prophet
from specjax.diffusion.unmask import EndOfText as EndOfText
from specjax.diffusion.guided import Guided as Guided, GuidedState as GuidedState
from specjax.diffusion.unmask import Learn2PD as Learn2PD
from specjax.diffusion.unmask import ReMDM as ReMDM
from specjax.diffusion.unmask import Redo as Redo
from specjax.diffusion.unmask import PathPlanning as PathPlanning
from specjax.diffusion.wino import Wino as Wino
from specjax.diffusion.unmask import ReDiff as ReDiff
from specjax.diffusion.unmask import JointThreshold as JointThreshold
from specjax.diffusion.unmask import Levenshtein as Levenshtein
from specjax.diffusion.unmask import RunningConfidence as RunningConfidence

# samplers for models without a mask
from specjax.diffusion.renoise import EntropyRenoise as EntropyRenoise

# cache policies
from specjax.diffusion.cache import BlockCausal as BlockCausal
from specjax.diffusion.cache import Delayed as Delayed
from specjax.diffusion.cache import Dual as Dual
from specjax.diffusion.cache import Freeze as Freeze
from specjax.diffusion.cache import Greedy as Greedy
from specjax.diffusion.cache import Interval as Interval
from specjax.diffusion.cache import NoCache as NoCache
from specjax.diffusion.cache import Prefix as Prefix
from specjax.diffusion.cache import Vicinity as Vicinity

# contracts and decoders
from specjax.diffusion.cache import Cache as Cache
from specjax.diffusion.unmask import Unmask as Unmask
from specjax.diffusion.assd import Assd as Assd, AssdInfo as AssdInfo, AssdState as AssdState
from specjax.diffusion.assd_drafts import AnySubset as AnySubset, AnySubsetDraft as AnySubsetDraft
from specjax.diffusion.assd_drafts import ContextNgram as ContextNgram, SelfDraft as SelfDraft
from specjax.diffusion.causal_context import CausalContext as CausalContext
from specjax.diffusion.block import BlockDiffusion as BlockDiffusion, BlockState as BlockState
from specjax.diffusion.window import WindowDiffusion as WindowDiffusion, WindowState as WindowState
from specjax.diffusion.canvas import CanvasDiffusion as CanvasDiffusion
from specjax.diffusion.canvas import CanvasInfo as CanvasInfo
from specjax.diffusion.canvas import CanvasLM as CanvasLM
from specjax.diffusion.canvas import CanvasState as CanvasState
from specjax.diffusion.decoder import DiffusionDecoder as DiffusionDecoder
from specjax.diffusion.make import diffusion as diffusion
from specjax.diffusion.state import DiffusionInfo as DiffusionInfo
from specjax.diffusion.state import DiffusionState as DiffusionState
