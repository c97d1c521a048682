"""Attention of a block of tree slots over a ragged cache prefix and over itself."""

from specjax.kernels.tree_attention.api import Implementation, tree_attention
from specjax.kernels.tree_attention.unrolled import Unrolled

__all__ = ["Implementation", "Unrolled", "tree_attention"]
