"""Other libraries over the weights of a bench. A line a peer."""

from specjax.bench.peers.with_llama_cpp import llama_cpp_peers
from specjax.bench.peers.with_transformers import transformers_peers

PEERS = {"transformers": transformers_peers, "llama.cpp": llama_cpp_peers}
"""Makes the contestants of a peer, by its name."""
