"""Published heads: files of random weights in every layout are read back, tensor by tensor, and run."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.conformance import TARGET, complete, params, plain, same

import specjax
from specjax.diffusion import Learn2PD
from specjax.draft import Eagle, Eagle3, Hydra, Medusa
from specjax.draft.heads.folder import load_head
from specjax.expand import Chain
from specjax.models import ModelError

E, V, F = 64, 96, 128
KV = 32


@pytest.fixture(scope="module")
def target():
    return specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))


def draw(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: (0.05 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def layer(at, inputs):
    shapes = {"q": (E, inputs), "k": (KV, inputs), "v": (KV, inputs), "o": (E, E)}
    shapes = {f"self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
    shapes |= {"mlp.gate_proj.weight": (F, E), "mlp.up_proj.weight": (F, E), "mlp.down_proj.weight": (E, F)}
    return {f"{at}.{name}": shape for name, shape in {**shapes, "post_attention_layernorm.weight": (E,)}.items()}


HF = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": E, "intermediate_size": F, "vocab_size": V,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16",
}  # fmt: skip


def medusa():
    shapes = {}
    for i in range(3):
        shapes |= {f"{i}.0.linear.weight": (E, E), f"{i}.0.linear.bias": (E,), f"{i}.1.weight": (V, E)}
    return {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "x", "version": "2"}, draw(
        1, **shapes
    )


def hydra(prefix=True):
    shapes = {}
    for i in range(3):
        wide = (i + 2) * E
        for part in ("linear", "res_connection"):
            shapes |= {f"hydra_mlp.{i}.1.{part}.weight": (E, wide), f"hydra_mlp.{i}.1.{part}.bias": (E,)}
        shapes |= {f"hydra_mlp.{i}.3.linear.weight": (E, E), f"hydra_mlp.{i}.3.linear.bias": (E,)}
        shapes |= {f"hydra_lm_head.{i}.1.weight": (V, E), f"hydra_lm_head.{i}.1.bias": (V,)}
    if prefix:
        shapes |= layer("prefix_embeding_layer.layers.0", E)
        shapes |= {
            "prefix_embeding_layer.layers.0.input_layernorm.weight": (E,),
            "prefix_embeding_layer.norm.weight": (E,),
        }
    arch = "prefix-mlp" if prefix else "mlp"
    config = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": arch, "grounded_heads": True}
    return config, draw(2, **shapes)


def eagle1():
    tensors = draw(3, **{"fc.weight": (E, 2 * E), "fc.bias": (E,)}, **layer("layers.0", E))
    return HF, tensors


def eagle3(at="midlayer"):
    shapes = {"fc.weight": (E, 3 * E), "norm.weight": (E,), "lm_head.weight": (40, E), **layer(at, 2 * E)}
    shapes |= {f"{at}.{norm}.weight": (E,) for norm in ("hidden_norm", "input_layernorm")}
    tensors = draw(4, **shapes)
    ids = np.arange(40) * 2 + 5
    tensors |= {"d2t": ids - np.arange(40), "t2d": np.isin(np.arange(V), ids)}
    return {**HF, "draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, tensors


def write(folder, config, tensors, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / file)
    return folder


CASES = {
    "medusa": (medusa, Medusa, "medusa", "medusa_lm_head.safetensors"),
    "hydra": (lambda: hydra(False), Hydra, "hydra", "hydra_lm_head.safetensors"),
    "hydra++": (hydra, Hydra, "hydra", "hydra_lm_head.safetensors"),
    "eagle1": (eagle1, Eagle, "eagle1", "model.safetensors"),
    "eagle3": (eagle3, Eagle3, "eagle3", "model.safetensors"),
    "eagle3, layers": (lambda: eagle3("layers.0"), Eagle3, "eagle3", "model.safetensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_published_file_is_read_and_runs(case, target, tmp_path):
    make, kind, name, file = CASES[case]
    config, tensors = make()
    drafter, own = load_head(write(tmp_path / "head", config, tensors, file), name, kind, target, expander=Chain(3))
    got, state = complete(drafter, model={"target": target.params, "draft": own})
    same(got, plain())
    if name == "medusa":
        np.testing.assert_array_equal(own["heads"][2]["kernel"], tensors["2.1.weight"].T)
        np.testing.assert_array_equal(own["heads"][1]["blocks"][0]["bias"], tensors["1.0.linear.bias"])
        assert len(own["heads"]) == 3  # config.json says 5: the tensors count
    if name == "eagle1":
        np.testing.assert_array_equal(own["fc"]["kernel"], tensors["fc.weight"].T)
        np.testing.assert_array_equal(own["layer"]["mlp"]["down"]["kernel"], tensors["layers.0.mlp.down_proj.weight"].T)
    if name == "eagle3":
        np.testing.assert_array_equal(own["ids"], np.arange(40) * 2 + 5)
        assert drafter.taps == (0, 1, 2)  # ids at the top level count what enters a layer
    if case == "hydra++":
        assert drafter.prefix_layer and drafter.layers == 2
        shortcut = own["heads"][1]["input"]["shortcut"]
        np.testing.assert_array_equal(shortcut, tensors["hydra_mlp.1.1.res_connection.weight"].T)


def reference_eagle3(config, t, at, embeds, taps):
    """The layer over a chain of pairs in float64, written out: logits of every slot."""
    norm = lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w
    g = taps @ t["fc.weight"].T
    x = np.concatenate([norm(embeds, t[f"{at}.input_layernorm.weight"]), norm(g, t[f"{at}.hidden_norm.weight"])], -1)
    q, k, v = (x @ t[f"{at}.self_attn.{n}_proj.weight"].T for n in "qkv")
    n = len(x)
    angle = np.arange(n)[:, None] / 10000 ** (np.arange(0, 8, 2) / 8)

    def rope(y, heads):
        y = y.reshape(n, heads, 8)
        a, b = y[..., :4], y[..., 4:]
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    q, k, v = rope(q, 8), rope(k, 4), v.reshape(n, 4, 8)
    out = np.zeros((n, 8, 8))
    for head in range(8):
        for i in range(n):
            scores = k[: i + 1, head // 2] @ q[i, head] / np.sqrt(8)
            w = np.exp(scores - scores.max())
            out[i, head] = w @ v[: i + 1, head // 2] / w.sum()
    h = g + out.reshape(n, -1) @ t[f"{at}.self_attn.o_proj.weight"].T
    m = norm(h, t[f"{at}.post_attention_layernorm.weight"])
    gate, up = m @ t[f"{at}.mlp.gate_proj.weight"].T, m @ t[f"{at}.mlp.up_proj.weight"].T
    h = h + (gate / (1 + np.exp(-gate)) * up) @ t[f"{at}.mlp.down_proj.weight"].T
    return norm(h, t["norm.weight"]) @ t["lm_head.weight"].T


def test_eagle3_logits_equal_a_slow_reference(target, tmp_path):
    import jax.numpy as jnp

    from specjax.lm import Block

    config, tensors = eagle3()
    drafter, own = load_head(write(tmp_path / "head", config, tensors), "eagle3", Eagle3, target)
    text = plain()[4][:12]
    rng = np.random.default_rng(0)
    taps = rng.standard_normal((11, 3 * E))
    block = Block(jnp.asarray([text[1:]]), jnp.arange(11)[None], jnp.zeros((1,), jnp.int32))
    model = {"target": target.params, "draft": own}
    h, _ = drafter.read(model, jnp.asarray(taps[None], jnp.float32), block, None)
    embeds = np.asarray(TARGET.embed(target.params, block.tokens))[0].astype(np.float64)
    wanted = reference_eagle3(config, {n: a.astype(np.float64) for n, a in tensors.items()}, "midlayer", embeds, taps)
    np.testing.assert_allclose(drafter.logits(model, h)[0], wanted, rtol=1e-3, atol=1e-4)


def test_torch_files_are_read(target, tmp_path):
    torch = pytest.importorskip("torch")
    config, tensors = eagle1()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(
        {name: torch.from_numpy(array).half() for name, array in tensors.items()}, tmp_path / "pytorch_model.bin"
    )
    _, own = load_head(tmp_path, "eagle1", Eagle, target)
    np.testing.assert_allclose(own["fc"]["bias"], tensors["fc.bias"], atol=1e-3)


def broken(case, change):
    make, kind, name, file = CASES[case]
    config, tensors = make()
    config, tensors = dict(config), dict(tensors)
    change(config, tensors)
    return config, tensors, kind, name, file


BAD = [
    ("eagle1", lambda c, t: t.pop("fc.bias"), r"missing fc.bias \[64\]"),
    ("eagle1", lambda c, t: t.update(extra=np.zeros(3, np.float32)), r"unknown extra \[3\]"),
    ("eagle1", lambda c, t: c.update(frob=True), "unknown flag 'frob'"),
    ("eagle1", lambda c, t: c.update(hidden_size=128), "128 wide .* belongs to another target"),
    ("eagle1", lambda c, t: c.update(vocab_size=97), "reads 97 tokens"),
    (
        "eagle1",
        lambda c, t: t.update({"embed_tokens.weight": np.ones((V, E), np.float32)}),
        "not the embedding of 'toy'",
    ),
    ("eagle1", lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers is 2"),
    ("eagle3", lambda c, t: t.update(d2t=np.zeros(40, np.int64) - np.arange(40)), "d2t .* increasing"),
    ("eagle3", lambda c, t: t.update(d2t=t["d2t"] + 60), "names token 143, the target has 0 to 95"),
    ("eagle3", lambda c, t: t.update(t2d=~t["t2d"]), "t2d and d2t name different"),
    ("eagle3", lambda c, t: t.pop("d2t"), "missing d2t"),
    ("eagle3", lambda c, t: c.update(post_norm=True), "unknown flag 'post_norm'"),
    ("eagle3", lambda c, t: c.update(eagle_config={"post_norm": True}), "unknown flag eagle_config.post_norm"),
    (
        "eagle3",
        lambda c, t: t.update({"fc.weight": np.zeros((E, 2 * E), np.float32)}),
        r"fc.weight has shape \[64, 128\]",
    ),
    ("medusa", lambda c, t: t.pop("1.0.linear.weight"), "missing 1.0.linear.weight"),
    ("hydra", lambda c, t: c.update(hydra_head_arch="cross-attention"), "supported are grounded mlp and prefix-mlp"),
    ("hydra++", lambda c, t: t.pop("prefix_embeding_layer.norm.weight"), "missing prefix_embeding_layer.norm.weight"),
]


@pytest.mark.parametrize("case,change,message", BAD)
def test_what_does_not_fit_is_named(case, change, message, target, tmp_path):
    config, tensors, kind, name, file = broken(case, change)
    with pytest.raises(ModelError, match=message):
        load_head(write(tmp_path / "head", config, tensors, file), name, kind, target)


def test_a_folder_that_is_no_head(target, tmp_path):
    with pytest.raises(ModelError, match="config.json"):
        load_head(tmp_path, "eagle1", Eagle, target)
    (tmp_path / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ModelError, match="holds no weights of a head"):
        load_head(tmp_path, "eagle1", Eagle, target)
    with pytest.raises(ModelError, match="has no published layout"):
        load_head(tmp_path, "learn2pd", Learn2PD, target)


class Planted:
    """Its pickle makes a file when it is read by a reader that runs what it is told."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


def test_a_pickle_that_is_more_than_weights_is_not_read(target, tmp_path):
    torch = pytest.importorskip("torch")
    config, tensors = medusa()
    write(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    weights = {name: torch.from_numpy(array) for name, array in tensors.items()}
    for content in ({**weights, "more": Planted(str(tmp_path / "ran"))}, {**weights, "more": [1]}, [1], b"PK damaged"):
        file = tmp_path / "pytorch_model.bin"
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
        with pytest.raises(ModelError) as error:
            load_head(tmp_path, "medusa", Medusa, target)
        said = str(error.value)
        assert "convert it to safetensors" in said and "\n" not in said and "weights_only" not in said
    assert not (tmp_path / "ran").exists()
    write(tmp_path, config | {"medusa_num_layers": []}, tensors)
    with pytest.raises(ModelError, match="config.json has a field of the wrong kind"):
        load_head(tmp_path, "medusa", Medusa, target)
