"""What bfloat16 weights take with coded exponents, and at which speed: `python -m experiments.few_bits.exact`.

Of the shipped model, and of a random one in the shape of Llama-3.2-1B: all of its layers are coded, a few are decoded with.
"""

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.models import LlamaLM, ModelConfig, llama_config
from specjax.models.few_bits import is_quantised, plain
from specjax.models.formats import read_format
from specjax.plan.held import chip_bytes

FILE = Path(__file__).resolve().parent / "exact.json"
LINES = "dfloat11", "dfloat11:group=0", "dfloat11:vocab=true"
ONE_B = llama_config(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
TIMED_LAYERS, RUNS = 2, 3


def layers_of(config: ModelConfig, seed: int) -> Any:
    """Random parameters, normal with the deviation that models begin with; norms are ones."""
    rng = np.random.default_rng(seed)

    def number(leaf):
        if len(leaf.shape) < 2:
            return jnp.ones(leaf.shape, leaf.dtype)
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * np.float32(0.02)).astype(leaf.dtype)

    return jax.tree.map(number, LlamaLM(config).abstract(jnp.bfloat16))


def sizes(params: Any, line: str) -> dict[str, Any]:
    """Bytes of parameters as they are and coded, bits of a coded number, and whether every bit comes back."""
    coded = read_format(line).params(params)
    nodes = [(a, b) for a, b in zip(*(jax.tree.leaves(t, is_leaf=is_quantised) for t in (coded, params)), strict=True)]
    own = [a for a, _ in nodes if is_quantised(a)]
    bits = lambda x: np.asarray(x).view(np.uint16)
    equal = all(np.array_equal(bits(jax.jit(plain)(a)), bits(b)) for a, b in nodes if is_quantised(a))
    count = sum(x.size for x in own)
    return {
        "plain": chip_bytes(params), "bytes": chip_bytes(coded), "coded": count,
        "bits": 8 * sum(map(chip_bytes, own)), "equal": equal,
    }  # fmt: skip


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The sizes of a model in several parts."""
    total = {name: sum(part[name] for part in parts) for name in ("plain", "bytes", "coded", "bits")}
    bits = total.pop("bits") / total["coded"]
    return total | {"bits_a_number": round(bits, 3), "equal": all(part["equal"] for part in parts)}


def timed(lm: LlamaLM, params: Any, lines: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Tokens a second of one greedy row, the best of some runs by turns, and what a program has besides its arguments."""
    decoder, rows = specjax.speculative(lm), {}
    prompts = specjax.Prompts.of([range(3, 11)], steps, keys=jax.random.split(jax.random.key(0), 1))
    known = {"plain": params} | {line: read_format(line).params(params) for line in lines}
    for line, own in known.items():
        given = {"target": own}
        begin = lambda given=given: decoder.init(given, prompts, capacity=128, cache_dtype=jnp.bfloat16)
        program = decoding.run_program.lower(decoder, given, begin(), np.int32(steps), np.int32(1)).compile()
        memory = program.memory_analysis()
        rows[line] = (
            begin,
            lambda state, given=given, program=program: program(given, state, np.int32(steps), np.int32(1)),
            memory,
        )
    best, text = dict.fromkeys(known, np.inf), {}
    for _ in range(RUNS):
        for line, (begin, run, _) in rows.items():
            state = jax.block_until_ready(begin())
            before = time.perf_counter()
            state = jax.block_until_ready(run(state))
            best[line] = min(best[line], time.perf_counter() - before)
            text[line] = np.asarray(state.tokens).tolist()
    return {
        line: {
            "tokens_per_second": round(steps / best[line], 2), "parameters": chip_bytes(known[line]),
            "temporaries": rows[line][2].temp_size_in_bytes, "same_text": text[line] == text["plain"],
        }
        for line in known
    }  # fmt: skip


def main() -> None:
    """Writes `exact.json`."""
    tiny = models.load("tiny", "bfloat16")
    found: dict[str, Any] = {"tiny": {line: added([sizes(tiny.params, line)]) for line in LINES}}
    found["tiny"]["speed"] = timed(tiny.lm, tiny.params, LINES[::2], 48)
    one = ONE_B.first(1)
    large: dict[str, Any] = {line: [] for line in LINES}
    for layer in range(ONE_B.num_hidden_layers):
        params = layers_of(one, layer)
        if layer:  # one table is enough
            params = {"layers": params["layers"]}
        for line in LINES:
            large[line].append(sizes(params, line))
    found["1B"] = {line: added(parts) for line, parts in large.items()}
    config = ONE_B.first(TIMED_LAYERS)
    found["1B"]["speed"] = timed(LlamaLM(config), layers_of(config, 0), LINES[:1], 6)
    found["about"] = (
        f"bfloat16, one greedy row on a CPU, the best of {RUNS} runs; 1B is timed with {TIMED_LAYERS} of its 16 layers"
    )
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
