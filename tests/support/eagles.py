"""Heads of EAGLE's kind with weights from a seed, under their published names, to compare with what the originals compute.

The numbers in the tests are those of the authors' own code, run with torch over these weights: its module (`Model`), and
its loss as its training script takes it. Two things were changed: HASS's and GRIFFIN's training gives the columns that a query
does not see a score of 0 before the softmax, and here, as in drafting, it was minus infinity. The 1e-5 that
all of them add to the number of learned tokens was left out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Output
from specjax.models import LlamaLM, llama_config
from specjax.models.model import Model
from specjax.objectives.base import Batch

V, E, INNER, KV = 24, 8, 12, 4
B, T = 2, 10
CONFIG = {
    "model_type": "llama", "hidden_size": E, "intermediate_size": INNER, "vocab_size": V, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False, "bias": True,
}  # fmt: skip
TARGET = LlamaLM(llama_config(V, E, INNER, 1, 2, 1, 4, max_position_embeddings=64, rms_norm_eps=1e-5))
PROMPT = 5
"""Tokens of a row that are not learned."""


def _layer(outputs: int, at: str = "layers.0", ours_at: str = "layer") -> dict[str, tuple[str, tuple[int, ...]]]:
    attention = {"q": (E, E), "k": (KV, E), "v": (KV, E), "o": (E, E)}
    mlp = {"gate": (INNER, E), "up": (INNER, E), "down": (outputs * E, INNER)}
    made = {f"self_attn.{n}_proj.weight": (f"attention.{n}.kernel", shape) for n, shape in attention.items()}
    made |= {f"mlp.{n}_proj.weight": (f"mlp.{n}.kernel", shape) for n, shape in mlp.items()}
    made["post_attention_layernorm.weight"] = ("mlp_norm.scale", (E,))
    return {f"{at}.{name}": (f"{ours_at}.{ours}", shape) for name, (ours, shape) in made.items()}


def _lstm(carries: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Torch's two biases of a layer are one of ours, and so are their numbers."""
    made = {}
    for i in range(2):
        made[f"lstm.weight_ih_l{i}"] = (f"lstm.{i}.enter.kernel", (4 * E, E if i else 2 * E))
        made[f"lstm.weight_hh_l{i}"] = (f"lstm.{i}.recur.kernel" if carries else "", (4 * E, E))
        made |= {f"lstm.bias_{n}_l{i}": (f"lstm.{i}.enter.bias", (4 * E,)) for n in ("ih", "hh")}
    return made


FC = {"fc.fc.weight": ("fc.kernel", (E, 2 * E)), "fc.fc.bias": ("fc.bias", (E,))}
TENSORS = {
    "eagle1": {"fc.weight": FC["fc.fc.weight"], "fc.bias": FC["fc.fc.bias"], **_layer(1)},
    "fspad": {
        **FC,
        "fc.post_attention_layernorm.weight": ("sample_norm.scale", (E,)),
        "fc.mlp.gate_proj.weight": ("sample.gate.kernel", (INNER, E)),
        "fc.mlp.up_proj.weight": ("sample.up.kernel", (INNER, E)),
        "fc.mlp.down_proj.weight": ("sample.down.kernel", (E, INNER)),
        **_layer(2),
    },
    "griffin": {
        **FC,
        "fc.post_attention_layernorm.weight": ("fc_norm.scale", (E,)),
        "fc.mlp.input_layernorm.weight": ("both_norm.scale", (E,)),
        "fc.mlp.up_proj.weight": ("both.up.kernel", (INNER, 2 * E)),
        "fc.mlp.down_proj.weight": ("both.down.kernel", (E, INNER)),
        **_layer(2),
    },
    "dovetail": {
        "input_layernorm.weight": ("token_norm.scale", (E,)),
        "W_1": ("feature.kernel", (E, E)),
        "W_2": ("token.kernel", (E, E)),
        "W_z": ("share.kernel", (2 * E, E)),
        "layers.1.input_layernorm.weight": ("more.0.attention_norm.scale", (E,)),
        **_layer(1),
        **_layer(1, "layers.1", "more.0"),
    },
    "falcon": {**_lstm(False), **_layer(1)},
    "falcon_carries": {**_lstm(True), **_layer(1)},
}
"""The published name of every tensor, ours (empty: none of ours), and its published shape; `W_*` are `[in, out]`."""


def drawn(kind: str, seed: int, scale: float = 0.4) -> dict[str, np.ndarray]:
    """Numbers for every tensor; norms are around 1."""
    rng = np.random.default_rng(seed)
    made = {name: scale * rng.standard_normal(shape) for name, (_, shape) in sorted(TENSORS[kind].items())}
    return {name: (x + ("norm" in name)).astype(np.float32) for name, x in made.items()}


def text(seed: int = 7) -> dict[str, np.ndarray]:
    """The target's table and head, and its final features over two rows of tokens."""
    rng = np.random.default_rng(seed)
    made = {name: rng.standard_normal(shape) for name, shape in (("embed", (V, E)), ("final", (B, T, E)))}
    made["head"] = 0.8 * rng.standard_normal((V, E))
    return {name: x.astype(np.float32) for name, x in made.items()} | {"tokens": rng.integers(1, V, (B, T))}


def target() -> Model:
    """The target, of which only the table and the head are read."""
    own = text()
    params = {"embed": {"embedding": jnp.asarray(own["embed"])}, "head": {"kernel": jnp.asarray(own["head"].T)}}
    return Model(TARGET, params, None, (), "toy", None, np.dtype("float32"))


def params_of(kind: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Our parameters."""
    made: dict[str, Any] = {}
    for name, (ours, _) in TENSORS[kind].items():
        if ours:
            *path, last = _keys(ours)
            place = functools.reduce(lambda inner, key: inner.setdefault(key, {}), path, made)
            place[last] = place.get(last, 0) + jnp.asarray(tensors[name] if name.startswith("W_") else tensors[name].T)
    return made


def _keys(ours: str) -> list[str | int]:
    return [int(key) if key.isdigit() else key for key in ours.split(".")]


def outputs(drafter: Any, own: Any, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `[B, W, F]` for the rows' pairs, and `[B, 1, F]` for the token 5 after them, which feeds on the last one's."""
    said, width = text(), T - 1
    model = {"target": target().params, "draft": own}
    at = jnp.broadcast_to(jnp.arange(width)[None], (B, width))
    pairs = Block(jnp.asarray(said["tokens"][:, 1:], jnp.int32), at, jnp.zeros((B,), jnp.int32))
    h, delta = jax.jit(drafter.read)(model, jnp.asarray(said["final"][:, :-1]), pairs, None)
    tokens, seen = jnp.full((B, 1), 5, jnp.int32), jnp.ones((B, 1, width + 1), bool)
    last = Block(tokens, jnp.full((B, 1), width), jnp.zeros((B,), jnp.int32), seen)
    more, _ = jax.jit(drafter.reread)(model, h[:, -1:], last, None, delta)
    return np.asarray(h), np.asarray(more)


def loss_and_slopes(kind: str, objective: Any) -> tuple[float, dict[str, float], dict[str, float]]:
    """The loss, the metrics, and how fast the loss changes as each tensor moves along numbers that are drawn for it."""
    said = text()
    mask = np.broadcast_to(np.arange(T)[None] >= PROMPT, (B, T))
    batch = Batch(
        jnp.asarray(said["tokens"], jnp.int32), jnp.asarray(mask), None, Output(None, final=jnp.asarray(said["final"]))
    )
    own = params_of(kind, drawn(kind, 1))
    run = jax.jit(
        jax.value_and_grad(lambda p: objective.loss(p, target().params, batch, jax.random.key(0)), has_aux=True)
    )
    (loss, metrics), grads = run(own)
    along = params_of(kind, drawn(kind, 2))
    slopes = jax.tree.map(lambda g, r: float((g * r).sum()), grads, along)
    found = {
        name: functools.reduce(lambda x, key: x[key], _keys(ours), slopes)
        for name, (ours, _) in TENSORS[kind].items()
        if ours
    }
    return float(loss), {name: float(x) for name, x in metrics.items()}, found
