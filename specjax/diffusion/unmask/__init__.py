"""Unmask policies: which of a block's predictions to commit. One file and one line per method.

Methods that `specjax.diffusion` exports too are listed in its order.
"""
# isort: skip_file

from specjax.diffusion.unmask.threshold import Threshold as Threshold
from specjax.diffusion.unmask.fixed import Fixed as Fixed
from specjax.diffusion.unmask.sequential import Sequential as Sequential
from specjax.diffusion.unmask.dream import Dream as Dream
from specjax.diffusion.unmask.factor import Factor as Factor
from specjax.diffusion.unmask.entropy import EntropyBound as EntropyBound
from specjax.diffusion.unmask.entropy_budget import EntropyBudget as EntropyBudget
from specjax.diffusion.unmask.local_leap import LocalLeap as LocalLeap
from specjax.diffusion.unmask.hierarchy import Hierarchy as Hierarchy
from specjax.diffusion.unmask.slow_fast import SlowFast as SlowFast
from specjax.diffusion.unmask.longest_prefix import LongestPrefix as LongestPrefix
from specjax.diffusion.unmask.klass import Klass as Klass
from specjax.diffusion.unmask.multi_block import MultiBlock as MultiBlock
from specjax.diffusion.unmask.credit import Credit as Credit
from specjax.diffusion.unmask.prophet import Prophet as Prophet
from specjax.diffusion.unmask.end_of_text import EndOfText as EndOfText
from specjax.diffusion.unmask.learn2pd import Learn2PD as Learn2PD
from specjax.diffusion.unmask.remdm import ReMDM as ReMDM
from specjax.diffusion.unmask.remask import Redo as Redo
from specjax.diffusion.unmask.path_planning import PathPlanning as PathPlanning
from specjax.diffusion.unmask.rediff import ReDiff as ReDiff
from specjax.diffusion.unmask.joint_threshold import JointThreshold as JointThreshold
from specjax.diffusion.unmask.levenshtein import Levenshtein as Levenshtein
from specjax.diffusion.unmask.remask import RunningConfidence as RunningConfidence

# the contract
from specjax.diffusion.unmask.base import Choice as Choice, Guess as Guess, Unmask as Unmask
from specjax.diffusion.unmask.wrapper import Wrapper as Wrapper
