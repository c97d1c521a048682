"""Trains the shipped target, then the shipped draft, and writes both folders. See README.md for the commands."""

import argparse
import functools
import json
import math
import os
import pathlib
import time
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from experiments.pretrain import attention, corpus, export
from specjax.bench import stdlib
from specjax.lm import Block, Wants
from specjax.models.llama import LlamaConfig, LlamaLM

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def model_of(section: dict, vocab_size: int) -> LlamaLM:
    """The model of a section of config.toml."""
    return LlamaLM(
        LlamaConfig(
            vocab_size=vocab_size,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            **section["model"],
        )
    )


def initial(lm: LlamaLM, seed: int) -> Any:
    """Random parameters; the tied embedding is small, and what writes to the residual stream is scaled by depth."""
    params = lm.init(jax.random.key(seed))
    depth = math.sqrt(2 * lm.num_layers)
    params["embed"]["embedding"] = params["embed"]["embedding"] * (0.02 * math.sqrt(lm.config.hidden_size))
    for layer in params["layers"].values():
        layer["attention"]["o"]["kernel"] = layer["attention"]["o"]["kernel"] / depth
        layer["mlp"]["down"]["kernel"] = layer["mlp"]["down"]["kernel"] / depth
    return params


def logits_of(lm: LlamaLM, params: Any, tokens: jax.Array) -> jax.Array:
    """Plain left-to-right logits `[B, T, V]` of `[B, T]`."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    block = Block(tokens, positions, length=jnp.zeros(batch, jnp.int32), causal=True)
    with attention.swapped_in():
        return lm(params, block, None, wants=Wants(logits=True)).logits


def optimizer(section: dict) -> optax.GradientTransformation:
    """Muon for the layers' kernels, Adam for the rest, behind a clipped gradient."""

    def kernels(params: Any) -> Any:
        numbers = optax.contrib.MuonDimensionNumbers()
        return jax.tree_util.tree_map_with_path(lambda path, _: numbers if path[-1].key == "kernel" else None, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            section["muon_rate"],
            adam_learning_rate=section["adam_rate"],
            adam_b2=0.98,
            weight_decay=section["weight_decay"],
            muon_weight_dimension_numbers=kernels,
        ),
    )


def make_step(lm: LlamaLM, tx: optax.GradientTransformation, teacher: tuple[LlamaLM, Any] | None, distill: float):
    """The jitted update. The loss is cross-entropy with the text's labels, mixed with the teacher's distribution."""

    def loss_fn(params, inputs, targets, soft):
        logits = logits_of(lm, params, inputs)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        text = jnp.mean(log_z - picked)
        if soft is None:
            return text, text
        taught = jnp.mean(log_z - jnp.einsum("btv,btv->bt", soft, logits))
        return (1 - distill) * text + distill * taught, text

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, rows, rate, teacher_params):
        inputs, targets = rows[:, :-1], rows[:, 1:]
        soft = None if teacher is None else jax.nn.softmax(logits_of(teacher[0], teacher_params, inputs))
        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, inputs, targets, soft)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: rate * u, updates))
        return params, opt_state, loss

    return step


def rate_at(section: dict, step: int, spent: float) -> float:
    """Warm-up by steps, then flat, then linear to 0 at the end of the budget."""
    warm = min(1.0, (step + 1) / section["warmup_steps"])
    return warm * min(1.0, max(0.0, (1.0 - spent) / (1.0 - section["decay_from"])))


@functools.partial(jax.jit, static_argnums=0)
def _window_bits(lm, params, windows, counted):
    logits = logits_of(lm, params, windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.sum(losses * counted) / math.log(2)


def heldout_bits(lm: LlamaLM, params: Any, windows: np.ndarray, counted: np.ndarray, rows: int = 8) -> float:
    """Bits over the counted targets of all windows."""
    total = 0.0
    for i in range(0, len(windows), rows):
        w, c = windows[i : i + rows], counted[i : i + rows]
        short = rows - len(w)
        total += float(_window_bits(lm, params, np.pad(w, ((0, short), (0, 0))), np.pad(c, ((0, short), (0, 0)))))
    return total


def save_checkpoint(path: pathlib.Path, tree: Any, meta: dict) -> None:
    """Everything a run needs to go on, in one file that is replaced whole."""
    leaves = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    fresh = path.with_suffix(".new.npz")
    np.savez(fresh, meta=json.dumps(meta), **leaves)
    os.replace(fresh, path)


def load_checkpoint(path: pathlib.Path, tree: Any) -> tuple[Any, dict]:
    """The inverse of `save_checkpoint`; `tree` gives the structure."""
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"leaf_{i}"]) for i in range(len(jax.tree.leaves(tree)))]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves), json.loads(str(file["meta"]))


class Corpus:
    """Encoded training documents and held-out windows. `probe` is an even sample of the windows."""

    def __init__(self, tokenizer: Tokenizer, length: int):
        self.eos = tokenizer.token_to_id(corpus.EOS)
        train, heldout = stdlib.training_files(), stdlib.heldout_files()
        self.documents = corpus.encode_files(tokenizer, train)
        heldout_ids = corpus.encode_files(tokenizer, heldout)
        self.windows, self.counted = corpus.evaluation_windows(heldout_ids, self.eos, length)
        self.train_bytes = sum(len(stdlib.read(path).encode()) for path in train)
        self.heldout_bytes = sum(len(stdlib.read(path).encode()) for path in heldout)
        self.train_tokens = sum(map(len, self.documents))
        self.heldout_tokens = sum(map(len, heldout_ids))
        self.probe = slice(0, None, max(1, len(self.windows) // 24))

    def bits_per_byte(self, lm: LlamaLM, params: Any, full: bool) -> float:
        """Held-out bits per byte; from the probe, bytes are taken in proportion to tokens."""
        part = slice(None) if full else self.probe
        windows, counted = self.windows[part], self.counted[part]
        bits = heldout_bits(lm, params, windows, counted)
        return float(bits / (self.heldout_bytes * counted.sum() / self.heldout_tokens))


def train(
    section: dict,
    data: Corpus,
    lm: LlamaLM,
    work: pathlib.Path,
    export_folder: pathlib.Path,
    tokenizer: Tokenizer,
    teacher: tuple[LlamaLM, Any] | None = None,
) -> tuple[Any, dict]:
    """Trains one model within its budget and returns its parameters and figures. Goes on from a checkpoint if there is one."""
    params = initial(lm, section["seed"])
    tx = optimizer(section)
    opt_state = tx.init(params)
    step, cpu_before, wall_before = 0, 0.0, 0.0
    checkpoint = work / f"{section['name']}.npz"
    if checkpoint.exists():
        (params, opt_state), meta = load_checkpoint(checkpoint, (params, opt_state))
        step, cpu_before, wall_before = meta["step"], meta["cpu_s"], meta["wall_s"]
        print(f"{section['name']}: going on from step {step}", flush=True)
        if meta["done"]:
            export.save(export_folder, lm, params, tokenizer)
            return params, meta
    update = make_step(lm, tx, teacher, section.get("distill", 0.0))
    teacher_params = None if teacher is None else teacher[1]
    long_length, rows = section["long_length"], section["batch_tokens"] // section["long_length"]
    stream = corpus.batches(data.documents, data.eos, long_length, rows, section["seed"], step)
    bits_per_nat_byte = data.train_tokens / data.train_bytes / math.log(2)
    cpu_start, wall_start = time.process_time(), time.monotonic()
    saved, losses = wall_start, []

    def clocks() -> tuple[float, float]:
        return cpu_before + time.process_time() - cpu_start, wall_before + time.monotonic() - wall_start

    log = (work / f"{section['name']}.jsonl").open("a")
    while True:
        cpu, wall = clocks()
        spent = max(cpu / (60 * section["cpu_minutes"]), wall / (60 * section["wall_minutes"]))
        done = spent >= 1.0
        if done or (step % 100 == 0 and losses):
            record = {
                "step": step,
                "tokens": step * section["batch_tokens"],
                "cpu_s": round(cpu, 1),
                "wall_s": round(wall, 1),
                "spent": round(spent, 4),
                "train_bits_per_byte": round(float(np.mean(jax.device_get(losses))) * bits_per_nat_byte, 4),
                "heldout_bits_per_byte": round(data.bits_per_byte(lm, params, full=False), 4),
            }
            losses = []
            log.write(json.dumps(record) + "\n")
            log.flush()
            print(section["name"], record, flush=True)
        if done or time.monotonic() - saved > 240:
            meta = {"step": step, "cpu_s": cpu, "wall_s": wall, "done": done}
            save_checkpoint(checkpoint, (params, opt_state), meta)
            export.save(export_folder, lm, params, tokenizer)
            saved = time.monotonic()
            if done:
                return params, meta
        batch = next(stream)
        if spent < section["long_from"]:
            batch = shorten(batch, section["short_length"])
        params, opt_state, loss = update(
            params, opt_state, jnp.asarray(batch), jnp.float32(rate_at(section, step, spent)), teacher_params
        )
        losses.append(loss)
        jax.block_until_ready(loss)  # the clocks above must see this step's time
        step += 1


def shorten(rows: np.ndarray, length: int) -> np.ndarray:
    """The same targets in shorter rows: `[R, n * length + 1]` to `[R * n, length + 1]`."""
    pieces = [rows[:, i : i + length + 1] for i in range(0, rows.shape[1] - 1, length)]
    return np.concatenate(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=pathlib.Path, default=REPOSITORY / "out" / "pretrain", help="checkpoints and logs"
    )
    parser.add_argument(
        "--export", type=pathlib.Path, default=REPOSITORY / "models" / "pretrained", help="model folders"
    )
    parser.add_argument("--config", type=pathlib.Path, default=HERE / "config.toml")
    args = parser.parse_args()
    recipe = tomllib.loads(args.config.read_text())
    args.work.mkdir(parents=True, exist_ok=True)

    vocab_size = recipe["tokenizer"]["vocab_size"]
    tokenizer_file = args.work / "tokenizer.json"
    if tokenizer_file.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = corpus.train_tokenizer([stdlib.read(path) for path in stdlib.training_files()], vocab_size)
        tokenizer.save(str(tokenizer_file))
    target, draft = model_of(recipe["target"], vocab_size), model_of(recipe["draft"], vocab_size)
    for section, lm in ((recipe["target"], target), (recipe["draft"], draft)):
        if not (args.export / section["name"] / "config.json").exists():  # folders to build against from the start
            export.save(args.export / section["name"], lm, initial(lm, section["seed"]), tokenizer)
    data = Corpus(tokenizer, recipe["target"]["long_length"])
    print(
        f"{data.train_tokens} training tokens in {data.train_bytes} bytes; {data.heldout_tokens} held out", flush=True
    )

    target_params, target_run = train(
        recipe["target"], data, target, args.work, args.export / recipe["target"]["name"], tokenizer
    )
    teacher = (target, target_params)
    draft_params, draft_run = train(
        recipe["draft"], data, draft, args.work, args.export / recipe["draft"]["name"], tokenizer, teacher
    )
    figures = {
        "train_bytes": data.train_bytes,
        "train_tokens_per_epoch": data.train_tokens,
        "heldout_bytes": data.heldout_bytes,
        "heldout_tokens": data.heldout_tokens,
    }
    for section, lm, params, run in (
        (recipe["target"], target, target_params, target_run),
        (recipe["draft"], draft, draft_params, draft_run),
    ):
        as_shipped = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params)
        figures[section["name"]] = {
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "steps": run["step"],
            "tokens_seen": run["step"] * section["batch_tokens"],
            "cpu_minutes": round(run["cpu_s"] / 60, 1),
            "wall_minutes": round(run["wall_s"] / 60, 1),
            "heldout_bits_per_byte": round(data.bits_per_byte(lm, as_shipped, full=True), 4),
        }
    (args.work / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2), flush=True)


if __name__ == "__main__":
    main()
