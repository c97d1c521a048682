"""Drafters: where candidate tokens come from."""

from specjax.draft.base import Chunk, Drafter, Extra, Proposal, Trained, Verdict, View
from specjax.draft.fuse import Fused, fuse
from specjax.draft.model import ModelDrafter
from specjax.draft.none import NoDrafter
from specjax.draft.prompt_lookup import PromptLookup
from specjax.draft.token_recycling import TokenRecycling

__all__ = [
    "Chunk",
    "Drafter",
    "Extra",
    "Fused",
    "ModelDrafter",
    "NoDrafter",
    "PromptLookup",
    "Proposal",
    "TokenRecycling",
    "Trained",
    "Verdict",
    "View",
    "fuse",
]
