"""Pictures of decoding. `specjax.viz.text` has text versions for a terminal, under the same names.

Figures need matplotlib (`pip install 'specjax[plot]'`), which is imported with the first figure.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specjax.viz import text

if TYPE_CHECKING:
    from specjax.viz.figures import acceptance as acceptance
    from specjax.viz.figures import cache_layout as cache_layout
    from specjax.viz.figures import speedup as speedup
    from specjax.viz.figures import step_times as step_times
    from specjax.viz.figures import token_tree as token_tree
    from specjax.viz.figures import training as training
    from specjax.viz.figures import unmask_order as unmask_order

__all__ = [
    "acceptance", "cache_layout", "speedup", "step_times", "text", "token_tree", "training", "unmask_order",
]  # fmt: skip


if not TYPE_CHECKING:  # or any name would do

    def __dir__() -> list[str]:
        return sorted(__all__)

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(importlib.import_module("specjax.viz.figures"), name)
        raise AttributeError(f"module 'specjax.viz' has no attribute {name!r}")
