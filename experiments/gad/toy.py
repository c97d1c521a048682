"""A toy language, and a small target with an encoder that translates it: `python -m experiments.gad.toy FOLDER`.

Every source word has two translations of one to three tokens, and a word of the first kind that stands before another one
comes after it. A target that is trained on such pairs has seen both translations of a word at about 0.65 and 0.35.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax import models
from specjax.lm import Block, Source, Wants
from specjax.models import LlamaLM, hf_config

START, FIRST = 2, 4
WORDS, TOKENS, KINDS = 40, 80, 12
"""Source words, tokens of translations, and words of the first kind."""
SIZE = FIRST + WORDS + TOKENS
SHORTEST, LONGEST, WIDE = 6, 14, 48
"""Words of a source, and slots of a text with its start and end."""
CONFIG = {
    "model_type": "mbart", "vocab_size": SIZE, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": 128, "eos_token_id": START, "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}  # fmt: skip
STEPS, BATCH, RATE = 1000, 48, 4e-3


@functools.cache
def dictionary() -> list[list[list[int]]]:
    """Both translations of every word."""
    rng = np.random.default_rng(1)
    phrase = lambda: (FIRST + WORDS + rng.integers(0, TOKENS, rng.integers(1, 4))).tolist()
    return [[phrase(), phrase()] for _ in range(WORDS)]


def pair(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A source and one of its translations."""
    source = rng.integers(0, WORDS, rng.integers(SHORTEST, LONGEST + 1)).tolist()
    order, at = [], 0
    while at < len(source):
        swapped = at + 1 < len(source) and source[at] < KINDS <= source[at + 1]
        order += [source[at + 1], source[at]] if swapped else [source[at]]
        at += 2 if swapped else 1
    text = [token for word in order for token in dictionary()[word][int(rng.random() < 0.35)]]
    return [FIRST + word for word in source], text[: WIDE - 2]


def sources(seed: int, count: int) -> list[list[int]]:
    """As many sources."""
    rng = np.random.default_rng(seed)
    return [pair(rng)[0] for _ in range(count)]


def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources `[B, LONGEST]` with -1 after them, their lengths `[B]`, and texts `[B, WIDE]` with -1 after them."""
    given, lengths, texts = np.full((BATCH, LONGEST), -1), np.zeros(BATCH), np.full((BATCH, WIDE), -1)
    for row in range(BATCH):
        source, text = pair(rng)
        given[row, : len(source)], lengths[row] = source, len(source)
        whole = [START, *text, START]
        texts[row, : len(whole)] = whole
    return given.astype(np.int32), lengths.astype(np.int32), texts.astype(np.int32)


def trained(steps: int = STEPS, seed: int = 0) -> tuple[LlamaLM, dict]:
    """The target, after as many updates."""
    lm = LlamaLM(hf_config.from_hf(CONFIG))
    params, rng = jax.jit(lm.init)(jax.random.key(seed)), np.random.default_rng(seed + 100)
    rule = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0, RATE, steps // 15, steps))
    )

    def loss(params, given, lengths, texts):
        cache = lm.encode(params, lm.init_cache(BATCH, WIDE), Source(given, lengths))
        at = jnp.broadcast_to(jnp.arange(WIDE - 1)[None], (BATCH, WIDE - 1))
        block = Block(texts[:, :-1], at, jnp.zeros(BATCH, jnp.int32))
        logs = jax.nn.log_softmax(lm(params, block, cache, wants=Wants(logits=True)).logits)
        own = jnp.take_along_axis(logs, jnp.maximum(texts[:, 1:], 0)[..., None], axis=2)[..., 0]
        return -jnp.where(texts[:, 1:] >= 0, own, 0).sum() / (texts[:, 1:] >= 0).sum()

    @jax.jit
    def update(params, state, *arrays):
        value, grads = jax.value_and_grad(loss)(params, *arrays)
        changes, state = rule.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value

    state = rule.init(params)
    for step in range(steps):
        params, state, value = update(params, state, *batch(rng))
        if step % 250 == 249:
            print(f"step {step + 1}: loss {value:.3f}", flush=True)
    return lm, params


def main(folder: Path) -> None:
    """Trains the target, and writes it and the sources to train on and to measure with."""
    lm, params = trained()
    generation = {"decoder_start_token_id": START}
    models.save(folder / "target", lm, params, eos_ids=(START,), generation=generation)
    for name, seed, count in (("sources", 1, 4000), ("held_out", 2, 64)):
        lines = [json.dumps({"prompt": source}) + "\n" for source in sources(seed, count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
