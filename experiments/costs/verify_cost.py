"""`python -m experiments.costs.verify_cost`: what a verdict costs by the verifier, at one vocabulary and one tree.

Logits of a target are drawn at random, those of a draft are these with noise, and children are i.i.d. draws from the draft's
distribution at their parent. Each verifier is timed alone, jitted, from logits to verdict, its own noise and the
target's draw included; the model and the drafting are not. Every round judges several trees, since a rule that goes
down pays for the nodes that it comes to.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.costs.printed import printed
from specjax.assembly.line import lines
from specjax.assembly.registry import make_verifier
from specjax.lm import Output
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.serve.options import check_least, option
from specjax.terminal import bad_input, flag, run_program
from specjax.tree import Topology, Tree
from specjax.verify import Verifier

TREES = 32
"""Judged in every round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """See the help of each."""

    verifiers: str = option(
        "coupled,recursive,k_seq,optimal", "lines of those without parameters that judge i.i.d. children"
    )
    vocab: int = option(32768, "vocabulary", least=2)
    tree: str = option("3 | 2 1 1 | 2 1 1", "child counts level by level")
    batch: int = option(1, "rows", least=1)
    spread: float = option(3.0, "standard deviation of the target's logits")
    noise: float = option(0.7, "that of what the draft's logits have besides")
    repeats: int = option(9, "rounds; the median counts", least=1)
    json: bool = option(False, "print one line of JSON")


def judge(verifier: Verifier, topology: Topology) -> Callable[..., Any]:
    """A jitted function from tokens `[B, N]`, logits and the draft's distribution `[B, N, V]`, and row keys to a
    verdict."""

    @jax.jit
    def run(tokens, logits, log_q, keys):
        rows, every = len(tokens), jnp.ones(tokens.shape, bool)
        log_q = log_q if verifier.keep_q else None
        tree = Tree.of(topology, tokens, every, log_q=log_q, children="iid" if verifier.keep_q else "deterministic")
        text = jnp.zeros((rows, 8), jnp.int32), jnp.ones(rows, jnp.int32), every[:, 0]
        sampler = Sampler(keys, *text, SamplingArrays.make(rows, temperature=1.0))
        draw = sampler.draw(logits, tree.depth, tree.path_tokens, tree.max_depth) if verifier.wants.draw else None
        return verifier(Output(delta=(), logits=logits, draw=draw), tree, sampler)

    return run


def measure(options: VerifyOptions) -> dict[str, dict[str, float]]:
    """By verifier: milliseconds a verdict, the ratio to the first one's, and how many drafted tokens were kept in the mean.

    Raises:
      ValueError: on a verifier that needs what there is not here, or a tree that is none.
    """
    topology = Topology.from_counts(options.tree)
    parents = jnp.asarray(topology.parents)
    shape = (options.batch, len(topology.parents), options.vocab)
    logits = options.spread * jax.random.normal(jax.random.key(0), shape)
    log_q = jax.nn.log_softmax(logits + options.noise * jax.random.normal(jax.random.key(1), shape))
    above = log_q[:, jnp.maximum(parents, 0)]
    trees = [
        (
            jax.random.categorical(jax.random.key(2 + n), above).astype(jnp.int32),
            row_keys(n, map(str, range(options.batch))),
        )
        for n in range(TREES)
    ]
    runs = {}
    for name in lines([options.verifiers]):
        verifier: Any = make_verifier(name)
        if not isinstance(verifier, Verifier) or "iid" not in verifier.judges:
            raise ValueError(f"--verifiers {name}: it needs parameters, or judges no i.i.d. children")
        runs[name] = judge(verifier, topology)
    kept = {
        name: statistics.mean(float(run(tokens, logits, log_q, keys).accepted.mean()) for tokens, keys in trees)
        for name, run in runs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            for tokens, keys in trees:
                jax.block_until_ready(run(tokens, logits, log_q, keys))
            seconds[name].append((time.perf_counter() - began) / TREES)
    times = {name: 1000 * statistics.median(own) for name, own in seconds.items()}
    first = next(iter(times.values()))
    return {
        name: {"ms": round(ms, 3), "ratio": round(ms / first, 2), "kept": round(kept[name], 3)}
        for name, ms in times.items()
    }


def command(options: VerifyOptions) -> int:
    """Measures and prints."""
    with bad_input():
        check_least(options, flag)
        found = measure(options)
    said = lambda own: f"{own['ms']:9.3f} ms per verdict   {own['ratio']:5.2f} x   {own['kept']:.2f} tokens kept"
    return printed(found, options.json, said)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_program(
        "python -m experiments.costs.verify_cost", "A verdict's cost by verifier.", VerifyOptions, command, argv
    )


if __name__ == "__main__":
    sys.exit(main())
