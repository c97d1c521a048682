"""Another name of `specjax.serve.engine`."""

from specjax.serve.engine import Engine, generate

__all__ = ["Engine", "generate"]
