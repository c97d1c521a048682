"""specjax: fast language-model decoding as pure, jit-compiled state transitions.

`import specjax` loads jax and numpy only; models, training and the command line come in when they are used.
"""

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from specjax import startup

with startup.without_remarks():
    startup.check_links(Path(__file__).parent)
    startup.check_words(startup.command_line())
    importlib.import_module("jax")

from specjax import decoder, draft, expand, sampling, verify
from specjax.decoder import run, stream
from specjax.prompts import Prompts
from specjax.speculative import Speculative, StepInfo, speculative
from specjax.state import DecodeState, Finish
from specjax.tree import Topology, Tree

if TYPE_CHECKING:
    from specjax import decode as decode
    from specjax import models as models
    from specjax import viz as viz
    from specjax.models import load as load
    from specjax.models.text import Chat as Chat
    from specjax.serve.engine import Engine as Engine
    from specjax.serve.engine import generate as generate
    from specjax.serve.sampling import Sampling as Sampling
    from specjax.serve.score import score as score

    __version__: str

__all__ = [
    "Chat",
    "Engine",
    "Sampling",
    "decode",
    "load",
    "DecodeState",
    "Finish",
    "Prompts",
    "Speculative",
    "StepInfo",
    "Topology",
    "Tree",
    "decoder",
    "draft",
    "expand",
    "generate",
    "models",
    "run",
    "sampling",
    "score",
    "speculative",
    "stream",
    "verify",
    "viz",
]


_MODULES = ("decode", "models", "viz")
_HOME = {
    "Chat": "models.text",
    "Engine": "serve.engine",
    "Sampling": "serve.sampling",
    "generate": "serve.engine",
    "load": "models",
    "score": "serve.score",
}
"""Where names are found that are imported when they are used."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def __getattr__(name: str):
    if name == "__version__":
        return importlib.metadata.version(__name__)  # pyproject.toml's
    if name in _MODULES:
        return importlib.import_module(f"specjax.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"specjax.{_HOME[name]}"), name)
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")
