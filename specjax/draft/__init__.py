"""Drafters: where candidate tokens come from. One line per method, in the order in which they are listed."""
# isort: skip_file

from specjax.draft.none import NoDrafter as NoDrafter
from specjax.draft.prompt_lookup import PromptLookup as PromptLookup
from specjax.draft.suffix import Suffix as Suffix
from specjax.draft.sam import Sam as Sam
from specjax.draft.ngram_mod import NgramMod as NgramMod
from specjax.draft.iad import InputGuided as InputGuided
from specjax.draft.forced import Forced as Forced
from specjax.draft.token_recycling import TokenRecycling as TokenRecycling
from specjax.draft.aded import Aded as Aded
from specjax.draft.stand import Stand as Stand
from specjax.draft.rest import Rest as Rest
from specjax.draft.jacobi import Jacobi as Jacobi
from specjax.draft.model import ModelDrafter as ModelDrafter
from specjax.draft.vocabularies import Tli as Tli
from specjax.draft.vocabularies import Slem as Slem
from specjax.draft.vocabularies import OmniDraft as OmniDraft
from specjax.draft.pard import Pard as Pard
from specjax.draft.pard2 import Pard2 as Pard2
from specjax.draft.gad import Gad as Gad
from specjax.draft.diffusion_draft import DiffusionDrafter as DiffusionDrafter
from specjax.draft.diffuspec import DiffuSpec as DiffuSpec
from specjax.draft.medusa import Medusa as Medusa
from specjax.draft.hydra import Hydra as Hydra
from specjax.draft.speculator import MLPSpeculator as MLPSpeculator
from specjax.draft.speculator import LSTMSpeculator as LSTMSpeculator
from specjax.draft.chimera import Chimera as Chimera
from specjax.draft.eagle import Eagle as Eagle
from specjax.draft.fspad import Fspad as Fspad
from specjax.draft.griffin import Griffin as Griffin
from specjax.draft.dovetail import Dovetail as Dovetail
from specjax.draft.falcon import Falcon as Falcon
from specjax.draft.gumiho import Gumiho as Gumiho
from specjax.draft.eagle3 import Eagle3 as Eagle3
from specjax.draft.peagle import PEagle as PEagle
from specjax.draft.dflash import DFlash as DFlash
from specjax.draft.dflash2 import DFlash2 as DFlash2
from specjax.draft.dspark import DSpark as DSpark
from specjax.draft.domino import Domino as Domino
from specjax.draft.jetspec import JetSpec as JetSpec
from specjax.draft.mtp import MTP as MTP
from specjax.draft.gemma4_assistant import Gemma4Assistant as Gemma4Assistant
from specjax.draft.longspec import LongSpec as LongSpec
from specjax.draft.clover import Clover as Clover
from specjax.draft.clover2 import Clover2 as Clover2
from specjax.draft.ppd import PPD as PPD
from specjax.draft.hidden_transfer import HiddenTransfer as HiddenTransfer
from specjax.draft.kangaroo import Kangaroo as Kangaroo
from specjax.draft.swift import Swift as Swift
from specjax.draft.del_ import DynamicExit as DynamicExit
from specjax.draft.s2d import S2D as S2D
from specjax.draft.easyspec import EasySpec as EasySpec
from specjax.draft.pearl import Pearl as Pearl
from specjax.draft.saguaro import Saguaro as Saguaro
from specjax.draft.mirror import MirrorSD as MirrorSD
from specjax.draft.small_cache import SmallCache as SmallCache
from specjax.draft.magicdec import MagicDec as MagicDec
from specjax.draft.rapid import Rapid as Rapid
from specjax.draft.main_experts import MainExperts as MainExperts
from specjax.draft.lud import Lud as Lud
from specjax.draft.self_diffusion import SelfDiffusion as SelfDiffusion
from specjax.draft.lookahead import Lookahead as Lookahead
from specjax.draft.cascade import Cascade as Cascade
from specjax.draft.switch import Switch as Switch

# rules for the length of a chain
from specjax.draft.adaptive import Confidence as Confidence
from specjax.draft.adaptive import Online as Online
from specjax.draft.goodput import Goodput as Goodput
from specjax.draft.utility import Utility as Utility
from specjax.draft.acceptance import Acceptance as Acceptance
from specjax.draft.adaptive import Scored as Scored

# drafters made of others
from specjax.draft.adaptive import Adaptive as Adaptive, adaptive as adaptive
from specjax.draft.fuse import Fused as Fused, fuse as fuse
from specjax.draft.rasd import Rasd as Rasd
from specjax.draft.trim import trim as trim

# the contract
from specjax.draft.base import Chunk as Chunk
from specjax.draft.base import Drafter as Drafter
from specjax.draft.base import Extra as Extra
from specjax.draft.base import Proposal as Proposal
from specjax.draft.base import Trained as Trained
from specjax.draft.base import View as View
from specjax.verify.base import Verdict as Verdict
