"""Prompts whose frequent pairs of tokens are merged before they are read (dynamic tokenization, arXiv:2411.18553)."""

from specjax.search.merged_prompts.merging import Merger as Merger
from specjax.search.merged_prompts.method import MergedPrompts as MergedPrompts
from specjax.search.merged_prompts.method import MergedWritten as MergedWritten
