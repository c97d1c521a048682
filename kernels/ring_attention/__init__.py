"""Attention over a sequence that is split over a mesh: queries stay, keys and values go round."""

from specjax.kernels.ring_attention.api import ring_attention

__all__ = ["ring_attention"]
