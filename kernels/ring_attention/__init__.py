"""Attention over a sequence that is split over a mesh: keys and values go round, or queries."""

from specjax.kernels.ring_attention.api import ring_attention

__all__ = ["ring_attention"]
