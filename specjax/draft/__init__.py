"""Drafters: where candidate tokens come from."""

from specjax.draft.adaptive import Acceptance, Adaptive, Confidence, Online, adaptive
from specjax.draft.base import Chunk, Drafter, Extra, Proposal, Trained, View
from specjax.draft.clover2 import Clover2
from specjax.draft.del_ import DynamicExit
from specjax.draft.diffuspec import DiffuSpec
from specjax.draft.eagle import Eagle
from specjax.draft.eagle3 import Eagle3
from specjax.draft.fuse import Fused, fuse
from specjax.draft.goodput import Goodput
from specjax.draft.hydra import Hydra
from specjax.draft.kangaroo import Kangaroo
from specjax.draft.lookahead import Lookahead
from specjax.draft.medusa import Medusa
from specjax.draft.model import ModelDrafter
from specjax.draft.none import NoDrafter
from specjax.draft.ppd import PPD
from specjax.draft.prompt_lookup import PromptLookup
from specjax.draft.rasd import Rasd
from specjax.draft.rest import Rest
from specjax.draft.stand import Stand
from specjax.draft.swift import Swift
from specjax.draft.token_recycling import TokenRecycling
from specjax.draft.trim import trim
from specjax.verify.base import Verdict

__all__ = [
    "Acceptance",
    "Adaptive",
    "Confidence",
    "Online",
    "adaptive",
    "trim",
    "Chunk",
    "Clover2",
    "DiffuSpec",
    "Drafter",
    "DynamicExit",
    "Eagle",
    "Eagle3",
    "Extra",
    "Fused",
    "Goodput",
    "Kangaroo",
    "Lookahead",
    "Hydra",
    "Medusa",
    "ModelDrafter",
    "NoDrafter",
    "PPD",
    "PromptLookup",
    "Proposal",
    "Rasd",
    "Rest",
    "Stand",
    "Swift",
    "TokenRecycling",
    "Trained",
    "Verdict",
    "View",
    "fuse",
]
