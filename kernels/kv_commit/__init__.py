"""Writes a block's accepted keys and values into the cache."""

from specjax.kernels.kv_commit.api import kv_commit

__all__ = ["kv_commit"]
