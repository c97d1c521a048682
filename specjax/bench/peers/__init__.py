"""Other libraries that run with the weights of a bench, one line per peer."""

from specjax.bench.peers.with_llama_cpp import llama_cpp_peers
from specjax.bench.peers.with_transformers import transformers_peers

PEERS = {"transformers": transformers_peers, "llama.cpp": llama_cpp_peers}
"""Functions that make a peer's contestants, by its name."""
