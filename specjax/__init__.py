"""specjax: fast language-model decoding as pure, jit-compiled state transitions.

`import specjax` loads only jax and numpy; models, training and the command line are imported on first use.
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
    from specjax import decode, diffusion, evaluate, models, rollouts, search, soft, tasks, train, viz
    from specjax.models import load
    from specjax.models.text import Chat
    from specjax.rollouts import rollout
    from specjax.serve.continuations import score
    from specjax.serve.engine import Engine
    from specjax.serve.generate import generate
    from specjax.serve.sampling import Sampling

    __version__: str

__all__ = [
    "Chat",
    "Engine",
    "Sampling",
    "decode",
    "load",
    "DecodeState",
    "Engine",
    "Finish",
    "Prompts",
    "Speculative",
    "StepInfo",
    "Topology",
    "Tree",
    "decoder",
    "diffusion",
    "draft",
    "evaluate",
    "expand",
    "generate",
    "load",
    "models",
    "rollout",
    "rollouts",
    "run",
    "sampling",
    "score",
    "search",
    "soft",
    "speculative",
    "stream",
    "tasks",
    "train",
    "verify",
    "viz",
]

if not TYPE_CHECKING:  # hidden from type checkers: with these, any name would pass as an attribute
    _LATER = {
        "Chat": "specjax.models.text:Chat",
        "Sampling": "specjax.serve.sampling:Sampling",
        "decode": "specjax.decode",
        "Engine": "specjax.serve.engine:Engine",
        "diffusion": "specjax.diffusion",
        "evaluate": "specjax.evaluate",
        "generate": "specjax.serve.generate:generate",
        "load": "specjax.models:load",
        "models": "specjax.models",
        "rollout": "specjax.rollouts:rollout",
        "rollouts": "specjax.rollouts",
        "score": "specjax.serve.continuations:score",
        "search": "specjax.search",
        "soft": "specjax.soft",
        "tasks": "specjax.tasks",
        "train": "specjax.train",
        "viz": "specjax.viz",
    }

    def __dir__() -> list[str]:
        return sorted([*__all__, "__version__"])

    def __getattr__(name: str):
        if name == "__version__":
            return importlib.metadata.version(__name__)  # the version in pyproject.toml
        module, _, inside = _LATER.get(name, "").partition(":")
        if not module:
            raise AttributeError(f"module 'specjax' has no attribute {name!r}")
        found = importlib.import_module(module)
        return getattr(found, inside) if inside else found
