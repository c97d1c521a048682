"""Other libraries that run with the weights of a bench, one line per peer."""

from specjax.bench.options import BenchOptions
from specjax.bench.peers.with_llama_cpp import llama_cpp_peers
from specjax.bench.peers.with_transformers import transformers_peers

PEERS = {"transformers": transformers_peers, "llama.cpp": llama_cpp_peers}
"""Functions that make a peer's modes, by its name. They are given the options, our engines and the longest text's tokens."""


def peers_of(options: BenchOptions) -> list[str]:
    """The names of the peers that were asked for.

    Raises:
      ValueError: on an unknown one.
    """
    asked = list(dict.fromkeys(name for word in options.peer for name in word.split(",")))
    unknown = [name for name in asked if name not in PEERS]
    if unknown:
        raise ValueError(f"unknown peer {unknown[0]!r}; choose {', '.join(PEERS)}")
    return asked
