"""Gumiho's files and drafts against its network written out in float64, and its training against the authors' code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.published import E, V, decoder_layer, draw, llama, toy, write

from specjax.draft import Chunk, Gumiho, View
from specjax.draft.gumiho.objective import TrainGumiho
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.expand import Static, TopK
from specjax.lm import Block, Output
from specjax.models import ModelError
from specjax.objectives.base import Batch
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling.sampler import Sampler

MLPS, SEEN = 2, 5
TEXT = np.random.default_rng(3).integers(1, V, SEEN + 1)
FEATURES = np.random.default_rng(5).standard_normal((SEEN, E))


def gumiho():
    shapes = {"fc.weight": (E, 2 * E), "fc.bias": (E,), "layers.1.input_layernorm.weight": (E,)}
    shapes |= decoder_layer("layers.0", E) | decoder_layer("layers.1", E)
    for i in range(MLPS):
        for j in range(6):
            shapes |= {f"mlp.{i}.{j}.linear.weight": (E, E if j else 2 * E), f"mlp.{i}.{j}.linear.bias": (E,)}
    made = {name: x * (1 if "norm" in name else 4) for name, x in draw(11, shapes, np.float32).items()}
    return llama(num_hidden_layers=2, architectures=["LlamaForCausalLM"]), made


def norm(x, w):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w


def silu(x):
    return x * (1 + np.tanh(x / 2)) / 2


def rope(x):
    angle = np.arange(len(x))[:, None, None] / 10000 ** (np.arange(0, 8, 2) / 8)
    a, b, c, s = x[..., :4], x[..., 4:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def layer(t, at, x):
    own = lambda name, x: x @ t[f"{at}.{name}.weight"].T
    u = norm(x, t[f"{at}.input_layernorm.weight"]) if f"{at}.input_layernorm.weight" in t else x
    q, k, v = (own(f"self_attn.{name}_proj", u).reshape(len(x), -1, 8) for name in "qkv")
    k, v = np.repeat(rope(k), 2, axis=1), np.repeat(v, 2, axis=1)
    weight = np.exp(np.einsum("qhd,khd->hqk", rope(q), k) / np.sqrt(8)) * np.tri(len(x))
    attended = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v).reshape(len(x), -1)
    x = x + own("self_attn.o_proj", attended)
    m = norm(x, t[f"{at}.post_attention_layernorm.weight"])
    return x + own("mlp.down_proj", silu(own("mlp.gate_proj", m)) * own("mlp.up_proj", m))


def reference(t, path):
    """The feature after the drafted tokens of a path, which an output layer turns into the distribution of the next one."""
    t = {name: np.asarray(x, np.float64) for name, x in t.items()}
    table = np.asarray(toy().params["embed"]["embedding"], np.float64)
    features, tokens, pairs, h = list(FEATURES), list(TEXT[1:]), [], np.zeros(E)
    for depth in range(len(path) + 1):
        if depth >= 1:
            pairs.append(np.concatenate([table[path[depth - 1]], features[-1]]) @ t["fc.weight"].T + t["fc.bias"])
        if depth >= 2:
            h = np.concatenate(pairs[:2])
            at = f"mlp.{depth - 2}"
            for j in range(6):
                own = silu(h @ t[f"{at}.{j}.linear.weight"].T + t[f"{at}.{j}.linear.bias"])
                h = h + own if j else own
            continue
        if depth:
            tokens.append(path[0])
        x = np.concatenate([table[tokens], np.stack(features)], -1) @ t["fc.weight"].T + t["fc.bias"]
        h = layer(t, "layers.1", layer(t, "layers.0", x))[-1]
        features.append(h)
    return h


def drafted(drafter, own):
    """The tree after a text of which the target's features are `FEATURES`."""
    params = {"target": toy().params, "draft": own}
    tokens, real = jnp.asarray(TEXT[None]), jnp.ones((1, SEEN), bool)
    block = Block(tokens[:, :-1], jnp.arange(SEEN)[None], jnp.zeros((1,), jnp.int32))
    draft = drafter.init(params, 1, 16)
    read = Output(None, final=jnp.asarray(FEATURES[None], jnp.float32))
    draft = drafter.prefill(params, draft, Chunk(block, real, tokens[:, 1:]), read)
    length = jnp.asarray([SEEN + 1])
    view = View(tokens, length, length > 0, None, max_depth=drafter.depth)
    sampler = Sampler(row_keys(0, ["a"]), tokens, length, length > 0, SamplingArrays.make(1, temperature=0.0))
    return drafter.propose(params, draft, view, sampler).tree


@pytest.mark.slow
def test_every_path_is_drafted_as_published(tmp_path):
    """Each node's children are the likeliest tokens after its own path."""
    config, tensors = gumiho()
    head = read_head(write(tmp_path, config, tensors), drafter_of(tmp_path), Gumiho, toy())
    drafter, own = head.drafter, head.params
    assert (drafter.layers, drafter.mlps) == (2, MLPS)
    tree = Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0)))
    found = drafted(dataclasses.replace(drafter, expander=tree), own)
    table = np.asarray(toy().params["embed"]["embedding"], np.float64)
    for node in range(found.nodes):
        children = [n for n, parent in enumerate(tree.topology.parents) if parent == node]
        path, at = [], node
        while at > 0:
            path, at = [int(found.tokens[0, at]), *path], tree.topology.parents[at]
        if children:
            ranked = np.argsort(-(table @ reference(tensors, path)), kind="stable")
            wanted = ranked[[tree.topology.ranks[child] for child in children]].tolist()
            assert [int(found.tokens[0, child]) for child in children] == wanted, node


# The authors' `Model` in its training mode and the `compute_loss` of `main_deepspeed.py`, in float64 on what `taught` draws.
# The entropy of the target's distributions is taken off, and the last pair, which has no token to predict, does not count.
LOSS = 91.13030655416013
NORMS = {"fc": 94.0325135483093, "layer": 110.94682127768968, "more": 44.75430937425635, "mlps": 74.19351959474916}


def taught():
    """A table, and a batch of two texts with the features that a target is said to have there."""
    rng = np.random.default_rng(7)
    table, features, tokens = (
        rng.standard_normal((V, E)) / 4,
        rng.standard_normal((2, 12, E)),
        rng.integers(1, V, (2, 12)),
    )
    output = Output(None, final=jnp.asarray(features, jnp.float32))
    batch = Batch(jnp.asarray(tokens, jnp.int32), jnp.ones((2, 12), bool), output=output)
    return {**toy().params, "embed": {"embedding": jnp.asarray(table, jnp.float32)}}, batch


@pytest.mark.slow
def test_loss_and_gradient_are_the_authors(tmp_path):
    config, tensors = gumiho()
    head = read_head(write(tmp_path, config, tensors), "gumiho", Gumiho, toy())
    target, batch = taught()
    objective = TrainGumiho(head.drafter, noise=0.0)
    run = jax.jit(jax.value_and_grad(lambda own: objective.loss(own, target, batch, jax.random.key(0)), has_aux=True))
    (loss, metrics), grads = run(head.params)
    assert float(loss) == pytest.approx(LOSS, rel=1e-4) and "acceptance_3" in metrics
    assert {part: float(optax.tree.norm(grads[part])) for part in NORMS} == pytest.approx(NORMS, rel=1e-3)


def test_bad_gumiho_files_are_one_line_each(tmp_path):
    """Names as the authors' drafter has them are read too."""
    config, tensors = gumiho()
    double = {f"mlp.{name}" if name.startswith("mlp.") else name: x for name, x in tensors.items()}
    assert drafter_of(write(tmp_path / "double", config, double)) == "gumiho"
    assert read_head(tmp_path / "double", "gumiho", Gumiho, toy()).drafter.mlps == MLPS
    cases = {
        "no tensor of a layer": {name: x for name, x in tensors.items() if not name.startswith("mlp.")},
        "missing mlp.0.3.linear.bias": {name: x for name, x in tensors.items() if name != "mlp.0.3.linear.bias"},
        "missing layers.1.input_layernorm": {name: x for name, x in tensors.items() if "input_layernorm" not in name},
    }
    for number, (message, kept) in enumerate(cases.items()):
        with pytest.raises(ModelError, match=message):
            read_head(write(tmp_path / str(number), config, kept), "gumiho", Gumiho, toy())
    with pytest.raises(ValueError, match="gumiho: 2 MLPs draft 4 tokens, and the tree is 5 deep: choose depth=4"):
        Gumiho(TopK(k=2, depth=5, nodes=8), mlps=2)
    with pytest.raises(ValueError, match="gumiho: layers and mlps must be at least 1, got layers=0"):
        Gumiho(layers=0)
