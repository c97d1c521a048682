"""`python -m experiments.costs.step_cost`: what a decoding step costs by the number of tokens that it verifies.

A Llama of the given shape with random float32 weights decodes at batch 1 after a prefix of `--prefix` tokens. N = 1 is
plain decoding; N > 1 verifies a chain of N nodes whose drafting costs nothing and whose tokens are never accepted.
Every measurement is one `lax.while_loop` of whole steps. transformers decodes in the same run and rounds: a forward
loop with its own KV cache and argmax, which is leaner than its `generate`.
"""

import dataclasses
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decoder as decoding
from specjax.draft import Drafter
from specjax.draft.base import Proposal
from specjax.jobs import jsonl
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.serve.options import check_least, option, take
from specjax.speculative import speculative
from specjax.terminal import bad_input, flag, run_program
from specjax.tree import Topology, Tree


@dataclasses.dataclass(frozen=True)
class FreeChain(Drafter):
    """Proposes `size` - 1 tokens that no vocabulary holds, so nothing is ever accepted.

    Attributes:
      size: nodes, the root included.
      vocab_size: the target's.
    """

    size: int
    vocab_size: int

    @property
    def nodes(self) -> int:
        return self.size

    @property
    def depth(self) -> int:
        return self.size - 1

    def propose(self, params, draft, view, sampler):
        shape = (view.tokens.shape[0], self.size)
        tokens = jnp.full(shape, self.vocab_size, jnp.int32).at[:, 0].set(view.root)
        return Proposal(Tree.of(Topology.chain(self.size - 1), tokens, jnp.ones(shape, bool)), draft)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model and the setting that are measured."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    capacity: int
    prefix: int

    def check(self, nodes: Sequence[int], steps: int) -> None:
        """Raises ValueError where the numbers do not fit together."""
        small = [name for name, value in dataclasses.asdict(self).items() if value < 1]
        if small or min(nodes) < 1 or steps < 1:
            raise ValueError(f"{small[0] if small else 'nodes and steps'} must be at least 1")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"--hidden {self.hidden} must be an even number for each of {self.heads} heads")
        if self.prefix + steps + max(nodes) > self.capacity:
            raise ValueError(
                f"a prefix of {self.prefix}, {steps} steps and {max(nodes)} nodes need a --capacity of "
                f"{self.prefix + steps + max(nodes)}, got {self.capacity}"
            )


def ours(shape: Shape, nodes: Sequence[int], steps: int) -> dict[int, Callable[[], float]]:
    """For each N a function that runs `steps` steps and returns the seconds of one."""
    from specjax.models import LlamaLM, llama_config

    lm = LlamaLM(
        llama_config(
            shape.vocab, shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.heads,
            shape.hidden // shape.heads, shape.capacity,
        )
    )  # fmt: skip
    params = {"target": lm.init(jax.random.key(0)), "draft": None}

    def timer(size: int) -> Callable[[], float]:
        decoder = speculative(lm, FreeChain(size, shape.vocab) if size > 1 else None)
        ids = jnp.arange(shape.prefix, dtype=jnp.int32) % shape.vocab
        prompts = Prompts.of([ids], steps, keys=row_keys(0, ["step cost"]))
        state = decoder.init(params, prompts, capacity=shape.capacity, cache_dtype=jnp.dtype(jnp.float32))

        def once() -> float:
            mine = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # `run` consumes its state
            began = time.perf_counter()
            done = int(decoding.run(decoder, params, mine, steps).stats.steps[0])
            return (time.perf_counter() - began) / done

        return once

    return {size: timer(size) for size in nodes}


def transformers(shape: Shape, steps: int) -> Callable[[], float]:
    """A function that decodes `steps` tokens with transformers and returns the seconds of one.

    Raises:
      ValueError: when torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError("the transformers peer needs torch: pip install torch, or give --peer none") from error
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        max_position_embeddings=shape.capacity, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompt = torch.arange(shape.prefix)[None] % shape.vocab
    cache = DynamicCache(config=config)
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # below 5.24
    read = lambda tokens: model(tokens, use_cache=True, **{named: cache}).logits[:, -1:].argmax(-1)
    with torch.inference_mode():
        first = read(prompt)

    def once() -> float:
        grown = cache.get_seq_length() - shape.prefix
        if grown:
            cache.crop(-grown)
        token = first
        with torch.inference_mode():
            began = time.perf_counter()
            for _ in range(steps):
                token = read(token)
            return (time.perf_counter() - began) / steps

    return once


def measure(timers: dict[Any, Callable[[], float]], repeats: int) -> dict[Any, float]:
    """Milliseconds a step: one warm-up each, then the median of alternating rounds."""
    for once in timers.values():
        once()
    seconds: dict[Any, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, once in timers.items():
            seconds[name].append(once())
    return {name: round(1000 * statistics.median(own), 4) for name, own in seconds.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """See the help of each."""

    hidden: int = option(768, "model width")
    layers: int = option(12, "decoder layers")
    heads: int = option(12, "attention heads, and as many for keys and values")
    intermediate: int = option(2048, "width of the MLP")
    vocab: int = option(32000, "vocabulary")
    nodes: str = option("1,8,16,32", "verified nodes a step, a comma list")
    capacity: int = option(512, "cache slots")
    prefix: int = option(256, "tokens before the first step")
    steps: int = option(16, "steps a measurement")
    repeats: int = option(7, "rounds; the median counts", least=1)
    peer: str = option("transformers", "measured in the same rounds", choices=("transformers", "none"))
    json: bool = option(False, "print one line of JSON")


def command(options: StepOptions) -> int:
    """Measures and prints."""
    with bad_input():
        words = [word.strip() for word in options.nodes.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"--nodes must be a comma list of integers, got {options.nodes!r}")
        nodes = list(dict.fromkeys(map(int, words)))
        shape = take(Shape, vars(options))
        shape.check(nodes, options.steps)
        check_least(options, flag)
        timers: dict[Any, Callable[[], float]] = dict(ours(shape, nodes, options.steps))
        if options.peer != "none":
            timers["peer"] = transformers(shape, options.steps)
    times = measure(timers, options.repeats)
    peer = times.pop("peer", None)
    if options.json:
        content = {"step_ms": {str(size): ms for size, ms in times.items()}, "transformers_ms_per_token": peer}
        sys.stdout.write(jsonl.dumps(content) + "\n")
        return 0
    base = times[nodes[0]]
    for size, ms in times.items():
        sys.stdout.write(f"N={size:<4d} {ms:9.3f} ms per step   {ms / base:5.2f} x N={nodes[0]}\n")
    if peer is not None:
        sys.stdout.write(f"transformers {peer:.3f} ms per token (forward loop)   {peer / base:.2f} x N={nodes[0]}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "A step's cost by verified nodes."
    return run_program("python -m experiments.costs.step_cost", about, StepOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
