"""The gated delta rule of a block whose tokens have ancestors."""

from specjax.kernels.delta_rule.api import delta_rule

__all__ = ["delta_rule"]
