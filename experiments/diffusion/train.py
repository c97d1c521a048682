"""Trains the shipped diffusion model and writes its folder. See README.md for the commands."""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from experiments.diffusion.masking import corrupt
from experiments.pretrain import attention, corpus
from experiments.pretrain.train import load_checkpoint, optimizer, rate_at, save_checkpoint, shorten
from specjax import models
from specjax.bench import stdlib
from specjax.lm import Block, Wants
from specjax.models.llama import LlamaLM

MASK = "<|mask|>"
HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def started(model: Any, mask_id: int) -> tuple[LlamaLM, Any]:
    """The diffusion model before training: an autoregressive one, with biases of 0 and the mean embedding for the mask."""
    lm = LlamaLM(dataclasses.replace(model.lm.config, qkv_bias=True))
    params = lm.init(jax.random.key(0))
    known = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)}
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: known.get(jax.tree_util.keystr(path), jnp.zeros_like(leaf)).astype(jnp.float32), params
    )
    table = params["embed"]["embedding"]
    params["embed"]["embedding"] = table.at[mask_id].set(table.mean(axis=0))
    return lm, params


def masked_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The target's tokenizer, whose padding token, which no text holds, is the mask."""
    return Tokenizer.from_str(tokenizer.to_str().replace(corpus.PAD, MASK))


def logits_of(lm: LlamaLM, params: Any, tokens: jax.Array, ahead: jax.Array | None = None) -> jax.Array:
    """Logits `[B, T - 1, V]` for positions 1 to T - 1 of `[B, T]`, with `ahead` tokens to the right (None: all) in view."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    block = Block(tokens, positions, length=jnp.zeros(batch, jnp.int32), causal=False)
    with attention.swapped_in(ahead):
        return lm(params, block, None, wants=Wants(logits=True)).logits[:, :-1]


def losses(lm: LlamaLM, params: Any, tokens: jax.Array, masked: jax.Array, mask_id: int, ahead=None) -> jax.Array:
    """Nats `[B, T]` of each token given what is not masked and in view; 0 at position 0."""
    logits = logits_of(lm, params, jnp.where(masked, mask_id, tokens), ahead).at[:, :, mask_id].set(-jnp.inf)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.pad(each, ((0, 0), (1, 0)))


def view_ahead(recipe: dict, spent: float) -> int:
    """Tokens to the right in view: none at first, then exponentially more, all once `anneal` of the budget is spent.

    Gong et al. (2025, arXiv:2410.17891) open the mask of an autoregressive model by and by as well.
    """
    share = min(1.0, spent / recipe["anneal"])
    return round(recipe["length"] ** share) - 1 if share < 1 else recipe["length"]


def make_step(lm: LlamaLM, tx: optax.GradientTransformation, masking: dict, mask_id: int):
    """The jitted update. A row's loss is the mean over its learned tokens: LLaDA's 1/t weight, with the t that was drawn."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, tokens, rate, key, ahead):
        masked, learned = corrupt(key, *tokens.shape, masking)

        def loss_fn(params):
            each = losses(lm, params, tokens, masked, mask_id, ahead)
            return jnp.mean(jnp.sum(each * learned, axis=1) / learned.sum(axis=1))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: rate * u, updates))
        return params, opt_state, loss

    return step


@functools.partial(jax.jit, static_argnums=(0, 4))
def _probe(lm, params, tokens, masked, mask_id):
    each = losses(lm, params, tokens, masked, mask_id)
    return jnp.sum(each * masked) / masked.sum()


def probe(lm: LlamaLM, params: Any, windows: np.ndarray, mask_id: int, rows: int = 16) -> float:
    """Held-out nats a token, half of every window masked: a probe to follow the run by, no bound."""
    masked = np.random.default_rng(0).random(windows.shape) < 0.5
    masked[:, 0] = False
    pieces = [
        _probe(lm, params, windows[i : i + rows], masked[i : i + rows], mask_id) for i in range(0, len(windows), rows)
    ]
    return float(np.mean(jax.device_get(pieces)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=pathlib.Path, default=REPOSITORY / "out" / "diffusion", help="checkpoint and log"
    )
    parser.add_argument(
        "--export", type=pathlib.Path, default=REPOSITORY / "models" / "pretrained", help="model folders"
    )
    parser.add_argument("--config", type=pathlib.Path, default=HERE / "config.toml")
    args = parser.parse_args()
    recipe = tomllib.loads(args.config.read_text())
    args.work.mkdir(parents=True, exist_ok=True)

    start = models.load(recipe["start"], dtype="float32")
    tokenizer = start.tokenizer.backend_tokenizer
    eos, mask_id = tokenizer.token_to_id(corpus.EOS), tokenizer.token_to_id(corpus.PAD)
    length, rows = recipe["length"], recipe["batch_tokens"] // recipe["length"]
    documents = corpus.encode_files(tokenizer, stdlib.training_files())
    heldout = corpus.evaluation_windows(corpus.encode_files(tokenizer, stdlib.heldout_files()), eos, length - 1)[0][
        ::15
    ][:64]

    lm, params = started(start, mask_id)
    tx = optimizer(recipe)
    opt_state = tx.init(params)
    step, cpu_before, wall_before = 0, 0.0, 0.0
    checkpoint = args.work / "checkpoint.npz"
    if checkpoint.exists():
        (params, opt_state), meta = load_checkpoint(checkpoint, (params, opt_state))
        step, cpu_before, wall_before = meta["step"], meta["cpu_s"], meta["wall_s"]
        print(f"going on from step {step}", flush=True)
    update = make_step(lm, tx, recipe["masking"], mask_id)
    stream = corpus.batches(documents, eos, 512, recipe["batch_tokens"] // 512, recipe["seed"], step)
    cpu_start, wall_start = time.process_time(), time.monotonic()
    saved, trained = wall_start, []

    with (args.work / "metrics.jsonl").open("a") as log:
        while True:
            cpu = cpu_before + time.process_time() - cpu_start
            wall = wall_before + time.monotonic() - wall_start
            spent = max(cpu / (60 * recipe["cpu_minutes"]), wall / (60 * recipe["wall_minutes"]))
            done = spent >= 1.0
            if done or step % 50 == 0:
                record = {
                    "step": step, "tokens": step * rows * length, "cpu_s": round(cpu, 1), "wall_s": round(wall, 1),
                    "spent": round(spent, 4), "loss": round(float(np.mean(jax.device_get(trained))), 4) if trained else None,
                    "heldout_half_masked": round(probe(lm, params, heldout, mask_id), 4),
                }  # fmt: skip
                trained = []
                log.write(json.dumps(record) + "\n")
                log.flush()
                print(record, flush=True)
            if done or time.monotonic() - saved > 240:
                save_checkpoint(
                    checkpoint, (params, opt_state), {"step": step, "cpu_s": cpu, "wall_s": wall, "done": done}
                )
                saved = time.monotonic()
            if done:
                break
            batch = shorten(next(stream), length)[:, :-1]
            key = jax.random.fold_in(jax.random.key(recipe["seed"]), step)
            rate, ahead = jnp.float32(rate_at(recipe, step, spent)), jnp.int32(view_ahead(recipe, spent))
            params, opt_state, loss = update(params, opt_state, jnp.asarray(batch), rate, key, ahead)
            trained.append(loss)
            jax.block_until_ready(loss)  # the clocks above must see this step's time
            step += 1
    folder = args.export / recipe["name"]
    corpus.save_tokenizer(masked_tokenizer(tokenizer), folder, lm.config.max_position_embeddings, mask_token=MASK)
    models.save(folder, lm, params, dtype="float16", eos_ids=(eos,), diffusion=models.Masked(mask_id, shift=True))


if __name__ == "__main__":
    main()
