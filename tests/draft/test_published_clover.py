"""Clover-2's heads as their code saves them, against its network written out in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.published import E, V, decoder_layer, draw, llama, toy, write
from support.shapes import changed

from specjax.assembly.companions import Stored
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft import Clover2
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.expand import Static
from specjax.lm import Block
from specjax.models import LlamaLM, ModelError

TARGET = LlamaLM(changed(toy().lm.config, tie_word_embeddings=False, rope_theta=500.0))
TEXT = np.random.default_rng(3).integers(1, V, 9)


def target():
    """A model whose head is another matrix than its embedding, and whose rotary base is another than the head's."""
    head = np.random.default_rng(4).standard_normal((E, V)).astype(np.float32)
    return toy(TARGET, {**toy().params, "head": {"kernel": jnp.asarray(head)}})


def clover(**config):
    """The module's state: two layers, two regressive blocks, linear heads, and of the target its head, twice."""
    shapes = {"clover_norm.weight": (E,), "clover_head_norm.weight": (E,)}
    for i in range(2):
        shapes |= {**decoder_layer(f"layers.{i}", E), f"layers.{i}.input_layernorm.weight": (E,)}
    for block in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
        shapes |= {f"{block}.{name}.weight": (E, E) for name in "qkv"} | {
            f"{block}.{name}.bias": (E,) for name in "qkv"
        }
        shapes[f"{block}.input_layernorm.weight"] = (E,)
    shapes |= {"clover_head_mlp.weight": (E, E), "clover_head_mlp.bias": (E,)}
    shapes |= {"clover_head_mlp2.weight": (E, 2 * E), "clover_head_mlp2.bias": (E,)}
    tensors = {name: x * (1 if "norm" in name else 4) for name, x in draw(11, shapes, np.float32).items()}
    rows = np.asarray(target().params["head"]["kernel"]).T
    own = llama(num_hidden_layers=2, rope_theta=500.0, head_dim=None, bias=True)
    return {**own, **config}, {**tensors, "clover_embed_tokens.weight": rows, "lm_head.weight": rows}


def norm(x, w):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w


def rope(x):
    angle = np.arange(len(x))[:, None, None] / 10000 ** (np.arange(0, 8, 2) / 8)
    a, b, c, s = x[..., :4], x[..., 4:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def layer(t, at, x):
    own = lambda name, x: x @ t[f"{at}.{name}.weight"].T
    u = norm(x, t[f"{at}.input_layernorm.weight"])
    q, k, v = (own(f"self_attn.{name}_proj", u).reshape(len(x), -1, 8) for name in "qkv")
    k, v = np.repeat(rope(k), 2, axis=1), np.repeat(v, 2, axis=1)
    weight = np.exp(np.einsum("qhd,khd->hqk", rope(q), k) / np.sqrt(8)) * np.tri(len(x))
    x = x + own(
        "self_attn.o_proj", np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v).reshape(len(x), -1)
    )
    m = norm(x, t[f"{at}.post_attention_layernorm.weight"])
    gate = own("mlp.gate_proj", m)
    return x + own("mlp.down_proj", gate / (1 + np.exp(-gate)) * own("mlp.up_proj", m))


def mixed(t, at, x, y):
    """A regressive block: the cosine of query and key, head by head, scales the value."""
    own = lambda name, x: (x @ t[f"{at}.{name}.weight"].T + t[f"{at}.{name}.bias"]).reshape(len(x), 8, 8)
    q, k = own("q", norm(x, t[f"{at}.input_layernorm.weight"])), own("k", y)
    cosine = (q * k).sum(-1) / np.linalg.norm(q, axis=-1) / np.linalg.norm(k, axis=-1)
    return x + (cosine[..., None] * own("v", y)).reshape(len(x), -1)


def reference(t, features, tokens, drafted):
    """Logits of the last pair's two heads, the second given the token that the first drafted."""
    t = {name: np.asarray(x, np.float64) for name, x in t.items()}
    table, at = t["clover_embed_tokens.weight"], "clover_head_mlp"
    h = mixed(t, f"{at}_rnn", features, table[tokens])
    h = norm(layer(t, "layers.1", layer(t, "layers.0", h)), t["clover_norm.weight"])[-1:]
    e = table[[drafted]]
    first = h @ t[f"{at}.weight"].T + t[f"{at}.bias"]
    h = mixed(t, f"{at}_rnn2", h, e)
    second = np.concatenate([h, e], -1) @ t[f"{at}2.weight"].T + t[f"{at}2.bias"]
    return norm(np.concatenate([first, second]), t["clover_head_norm.weight"]) @ t["lm_head.weight"].T


@pytest.mark.slow
def test_the_network_is_the_published_one(tmp_path):
    config, tensors = clover()
    head = read_head(write(tmp_path, config, tensors), "clover2", Clover2, target())
    drafter, model = head.drafter, {"target": target().params, "draft": head.params}
    assert drafter_of(tmp_path) == "clover2" and drafter.published and drafter.cache_config.rope.theta == 10000
    features = np.random.default_rng(5).standard_normal((8, E))
    pairs = Block(jnp.asarray(TEXT[None, 1:]), jnp.arange(8)[None], jnp.zeros((1,), jnp.int32))
    h, _ = drafter.read(model, jnp.asarray(features[None], jnp.float32), pairs, None)
    e = drafter.embed(model, jnp.asarray([[40]]))
    dists = [
        drafter.dist(model, h[:, -1:], None, 0),
        drafter.dist(model, drafter.head.advance(head.params, h[:, -1:], e), e, 1),
    ]
    wanted = reference(tensors, features, TEXT[1:], 40)
    np.testing.assert_allclose(np.stack([dist[0, 0] for dist in dists]), wanted, rtol=1e-3, atol=1e-3)


def test_a_published_head_drafts_the_papers_tree(tmp_path):
    stored = parse("drafter", DRAFTERS, f"clover2:model={write(tmp_path, *clover())}")
    assert isinstance(stored, Stored)
    tree = stored.load(target())[0].expander
    assert isinstance(tree, Static) and (tree.nodes, tree.depth) == (26, 5)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop("clover_norm.weight"), "missing clover_norm.weight"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 2}), "lm_head.weight is not the head of 'toy'"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.")], "no tensor of a Clover-2 layer"),
    ],
)
def test_bad_files_are_one_line_each(change, message, tmp_path):
    config, tensors = clover()
    change(tensors)
    with pytest.raises(ModelError, match=message):
        read_head(write(tmp_path, config, tensors), "clover2", Clover2, target())
