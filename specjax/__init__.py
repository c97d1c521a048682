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
    from specjax import models as models
    from specjax import viz as viz
    from specjax.serve.engine import Engine as Engine
    from specjax.serve.engine import generate as generate
    from specjax.serve.score import score as score

    __version__: str

__all__ = [
    "DecodeState",
    "Engine",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def __getattr__(name: str):
    if name in ("Engine", "generate"):
        return getattr(importlib.import_module("specjax.serve.engine"), name)
    if name == "score":
        return importlib.import_module("specjax.serve.score").score
    if name == "models":
        return importlib.import_module("specjax.models")
    if name == "__version__":
        return importlib.metadata.version(__name__)  # pyproject.toml's
    if name == "viz":
        return importlib.import_module("specjax.viz")
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")
