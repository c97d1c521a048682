"""Attention of a block of tree slots over a ragged cache prefix and over itself."""

from specjax.kernels.tree_attention.api import Implementation, tree_attention

__all__ = ["Implementation", "tree_attention"]
