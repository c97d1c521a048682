"""BlockFFN and MiniCPM: published folders against a transcription in torch, and texts with trees."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow

import specjax
from specjax import models
from specjax.lm import Block, Wants
from specjax.models import ModelError, hf_config
from specjax.models.block_ffn import BlockFFNConfig, router_logits
from specjax.models.families import minicpm
from specjax.models.layer import LayerConfig
from specjax.models.model_config import HeadConfig
from specjax.serve.engine import Engine

safetensors = pytest.importorskip("safetensors.numpy")

X, F, E, HEADS, VOCAB, LAYERS = 6, 8, 64, 4, 64, 2
Q, KV, NOPE, ROPE = 24, 20, 12, 8
VALUE = E // HEADS
CONFIG = {
    "architectures": ["MiniCPMForCausalLM"], "vocab_size": VOCAB, "hidden_size": E, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_scaling": None, "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 16, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""What the published converter writes, at sizes of a test."""
MLA = {
    "attention_type": "mla", "q_lora_rank": Q, "kv_lora_rank": KV, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}  # fmt: skip
BLOCKS = {
    "ffn_gated": True, "router_act": "relu", "expert_size": F, "num_experts": X, "norm_after_router": "rms",
    "norm_scale": 1.0, "block_implementation": "torch",
}  # fmt: skip
KINDS = {
    "block_linear": CONFIG | MLA | BLOCKS | {"ffn_type": "block_linear"},
    "block": CONFIG | MLA | BLOCKS | {"ffn_type": "block"},
    "minicpm": CONFIG | {"num_key_value_heads": 2, "tie_word_embeddings": True},
}


def drawn(config, seed=0):
    """Random tensors in the published layout."""
    rng, found = np.random.default_rng(seed), {}

    def add(name, *shape):
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        found[name] = (rng.normal(size=shape) * scale + (len(shape) == 1)).astype(np.float32)

    add("model.embed_tokens.weight", VOCAB, E)
    add("model.norm.weight", E)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", VOCAB, E)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        add(f"{layer}.input_layernorm.weight", E)
        add(f"{layer}.post_attention_layernorm.weight", E)
        if "attention_type" in config:
            add(f"{layer}.self_attn.q_a_proj.weight", Q, E)
            add(f"{layer}.self_attn.q_a_layernorm.weight", Q)
            add(f"{layer}.self_attn.q_b_proj.weight", HEADS * (NOPE + ROPE), Q)
            add(f"{layer}.self_attn.kv_a_proj_with_mqa.weight", KV + ROPE, E)
            add(f"{layer}.self_attn.kv_a_layernorm.weight", KV)
            add(f"{layer}.self_attn.kv_b_proj.weight", HEADS * (NOPE + VALUE), KV)
        else:
            for name, heads in (("q", HEADS), ("k", 2), ("v", 2)):
                add(f"{layer}.self_attn.{name}_proj.weight", heads * VALUE, E)
        add(f"{layer}.self_attn.o_proj.weight", E, E)
        if "ffn_type" not in config:
            for name in ("gate", "up"):
                add(f"{layer}.mlp.{name}_proj.weight", 96, E)
            add(f"{layer}.mlp.down_proj.weight", E, 96)
            continue
        apart = config["ffn_type"] == "block"
        add(f"{layer}.mlp.router_proj.weight", X, E)
        add(f"{layer}.mlp.router_norm.weight", X)
        add(f"{layer}.mlp.up_proj", *((X, F, E) if apart else (X * F, E)))
        add(f"{layer}.mlp.down_proj", *((X, E, F) if apart else (E, X * F)))
    return found


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder of each kind."""
    made = {}
    for kind, config in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        (folder / "config.json").write_text(json.dumps(config))
        safetensors.save_file(drawn(config), folder / "model.safetensors")
        made[kind] = folder
    return made


def transcribed(config, tensors, ids):
    """Logits `[T, V]` and each layer's router logits `[T, X]` of ids `[T]`, as the published code computes them."""
    torch = pytest.importorskip("torch")
    t = {name: torch.from_numpy(np.array(x)) for name, x in tensors.items()}
    linear = torch.nn.functional.linear
    branch = config["scale_depth"] / math.sqrt(LAYERS)
    masked = torch.full((len(ids), len(ids)), -torch.inf).triu(1)

    def norm(x, name, eps=config["rms_norm_eps"]):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * t[name]

    def rotated(x):
        half = x.shape[-1] // 2
        angle = torch.arange(len(ids))[:, None] / 10000 ** (torch.arange(half) / half)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def by_heads(x, heads):
        return x.reshape(len(ids), heads, -1).transpose(0, 1)

    def attended(q, k, v, layer):
        chance = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + masked, -1)
        return linear((chance @ v).transpose(0, 1).reshape(len(ids), -1), t[f"{layer}.self_attn.o_proj.weight"])

    def latent(x, layer):
        own = lambda name: t[f"{layer}.self_attn.{name}.weight"]
        q = norm(linear(x, own("q_a_proj")), f"{layer}.self_attn.q_a_layernorm.weight", 1e-6)
        q = by_heads(linear(q, own("q_b_proj")), HEADS)
        both = linear(x, own("kv_a_proj_with_mqa"))
        kv = norm(both[:, :KV], f"{layer}.self_attn.kv_a_layernorm.weight", 1e-6)
        kv = by_heads(linear(kv, own("kv_b_proj")), HEADS)
        shared = rotated(both[None, :, KV:]).expand(HEADS, -1, -1)
        q = torch.cat([q[..., :NOPE], rotated(q[..., NOPE:])], -1)
        return attended(q, torch.cat([kv[..., :NOPE], shared], -1), kv[..., NOPE:], layer)

    def plain(x, layer):
        own = lambda name: linear(x, t[f"{layer}.self_attn.{name}_proj.weight"])
        q, k, v = by_heads(own("q"), HEADS), by_heads(own("k"), 2), by_heads(own("v"), 2)
        each = lambda x: x.repeat_interleave(HEADS // 2, 0)
        return attended(rotated(q), each(rotated(k)), each(v), layer)

    def fed(x, layer):
        own = lambda name: t[f"{layer}.mlp.{name}"]
        if "ffn_type" not in config:
            inner = torch.nn.functional.silu(linear(x, own("gate_proj.weight"))) * linear(x, own("up_proj.weight"))
            return linear(inner, own("down_proj.weight"))
        routers.append(linear(x, own("router_proj.weight")))
        weights = norm(torch.relu(routers[-1]), f"{layer}.mlp.router_norm.weight")
        if config["ffn_type"] == "block_linear":
            inner = torch.nn.functional.silu(linear(x, own("up_proj"))).view(len(ids), X, F) * weights[..., None]
            return linear(inner.reshape(len(ids), X * F), own("down_proj"))
        inner = torch.nn.functional.silu(x @ own("up_proj").transpose(1, 2)) * weights.T[..., None]
        return torch.einsum("esd,emd->sm", inner, own("down_proj"))

    routers: list = []
    h = t["model.embed_tokens.weight"][torch.as_tensor(ids)] * config["scale_emb"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        x = norm(h, f"{layer}.input_layernorm.weight")
        h = h + (latent if "attention_type" in config else plain)(x, layer) * branch
        h = h + fed(norm(h, f"{layer}.post_attention_layernorm.weight"), layer) * branch
    head = t["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    out = linear(norm(h, "model.norm.weight") / (E / config["dim_model_base"]), head)
    return out.numpy(), [x.numpy() for x in routers]


IDS = [5, 9, 11, 5, 9, 4, 40, 3]


def block_of(ids):
    slots = jnp.arange(len(ids), dtype=jnp.int32)[None]
    return Block(jnp.asarray([ids], jnp.int32), slots, jnp.zeros((1,), jnp.int32))


@pytest.mark.parametrize("kind", but_slow(KINDS, "block", "minicpm"))
def test_logits_are_those_of_the_published_code(folders, kind):
    model = models.load(folders[kind], dtype="float32")

    @jax.jit
    def read(params):
        with router_logits() as found:
            return model.lm(params, block_of(IDS), None, wants=Wants(logits=True)).logits, tuple(found)

    logits, found = read(model.params)
    want, routers = transcribed(KINDS[kind], drawn(KINDS[kind]), IDS)
    np.testing.assert_allclose(logits[0], want, rtol=2e-4, atol=2e-4)
    assert len(found) == len(routers) == (0 if kind == "minicpm" else LAYERS)
    for own, theirs in zip(found, routers, strict=True):
        np.testing.assert_allclose(own[0], theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", but_slow(KINDS, "block_linear", "minicpm"))
def test_a_folder_is_written_as_it_was_read(folders, tmp_path, kind):
    """One matrix of all experts, whichever way the file had them."""
    model = models.load(folders[kind], dtype="float32")
    models.save(tmp_path / "out", model.lm, model.params)
    again = models.load(tmp_path / "out", dtype="float32")
    assert again.lm == model.lm
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)
    given = KINDS[kind]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {name: written[name] for name in ("scale_emb", "scale_depth", "dim_model_base")}
    assert kept == {name: given[name] for name in kept} and written["model_type"] == "minicpm"
    names = {name: x.shape for name, x in safetensors.load_file(tmp_path / "out" / "model.safetensors").items()}
    wanted = "block_linear" if kind == "block" else kind
    assert names == {name: x.shape for name, x in drawn(KINDS[wanted]).items()}


@pytest.mark.parametrize("layers", (1, 2, 3, 7, 40))
def test_factors_are_written_so_that_they_are_read_exactly(layers):
    """Also those of a model that was not read from a file."""
    given = hf_config.from_hf(KINDS["block_linear"] | {"num_hidden_layers": layers})
    for branch, divisor in ((1.0, 1.0), (0.22, 3.7), (given.layers[0].residual_multiplier, 6.0)):
        own = given.every(LayerConfig, residual_multiplier=branch).every(HeadConfig, logits_scaling=divisor)
        assert hf_config.from_hf(hf_config.to_hf(own)) == own


@pytest.mark.slow
def test_one_matrix_and_one_for_each_expert_are_the_same_model(folders, tmp_path):
    """Parts of the second layout are read too, across the borders of experts."""
    tensors, linear = drawn(KINDS["block"]), {}
    for name, x in tensors.items():
        apart = x.ndim == 3
        up = x.reshape(X * F, E) if apart and "up" in name else x
        linear[name] = np.ascontiguousarray(np.moveaxis(x, 0, 1).reshape(E, X * F)) if apart and "down" in name else up
    (tmp_path / "config.json").write_text(json.dumps(KINDS["block_linear"]))
    safetensors.save_file(linear, tmp_path / "model.safetensors")
    one, other = (models.load(folder, dtype="float32") for folder in (tmp_path, folders["block"]))
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    found = models.tensors.read_folder(folders["block"])
    whole = minicpm.matrices(found, one.lm.config)["model.layers.1.mlp.down_proj"]
    part = np.empty((3, 13), np.float32)
    whole.read([(((2, 5), (5, 18)), part)])
    np.testing.assert_array_equal(part, linear["model.layers.1.mlp.down_proj"][2:5, 5:18])


@pytest.mark.parametrize(
    ("said", "message"),
    (
        ({"router_act": "sigmoid"}, "router_act must be 'relu', not 'sigmoid'"),
        ({"norm_after_router": "sum"}, "norm_after_router must be 'rms'"),
        ({"block_implementation": "fastmoe"}, "block_implementation must be 'torch' or 'kernel'"),
        ({"ffn_type": "moe"}, "ffn_type must be 'vanilla' or 'block' or 'block_linear'"),
        ({"attention_type": "linear"}, "attention_type must be 'vanilla' or 'mla'"),
        ({"v_head_dim": 8}, "v_head_dim must be hidden_size / num_attention_heads, 16, not 8"),
        ({"num_experts": 0}, "needs positive integers for: num_experts"),
        ({"ffn_type": "vanilla", "ffn_gated": False}, "ffn_gated must be true"),
    ),
)
def test_what_is_not_read(said, message):
    with pytest.raises(ModelError, match=message):
        hf_config.from_hf(KINDS["block_linear"] | said)


def with_capacity(model, capacity):
    config = model.lm.config.every(BlockFFNConfig, capacity=capacity)
    return dataclasses.replace(model, lm=dataclasses.replace(model.lm, config=config))


def texts(model, drafter):
    engine = Engine(model, drafter=drafter)
    asked = [engine.request(prompt, max_new_tokens=24, temperature=0) for prompt in ([5, 9, 11, 5, 9, 4], [7])]
    return {str(record.prompt): list(record.tokens) for record in engine.run(asked, batch_size=2)}


@pytest.mark.slow
def test_a_tree_writes_the_text_of_plain_decoding(folders):
    """Whether the union of its experts fits (one row of one token, or all experts) or overflows."""
    model = specjax.models.load(folders["block_linear"], dtype="float32")
    wanted = texts(with_capacity(model, X), "none")
    for capacity in (1, 3, X):
        assert texts(with_capacity(model, capacity), "token_recycling") == wanted


@pytest.mark.slow
def test_a_step_and_a_prompt_compute_the_same(folders):
    """A prompt's tokens are more rows than a step has, so their experts are multiplied whole."""
    model = models.load(folders["block_linear"], dtype="float32")
    ids = IDS * 9
    logits = lambda ids: model.lm(model.params, block_of(ids), None, wants=Wants(logits=True)).logits[0]
    np.testing.assert_allclose(logits(ids)[: len(IDS)], logits(ids[: len(IDS)]), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_int8_and_a_mesh(folders):
    """Matrices of few bits are multiplied whole; a mesh splits experts' columns."""
    from specjax.sharding import make_mesh

    folder = folders["block_linear"]
    logits = lambda model: model.lm(model.params, block_of(IDS), None, wants=Wants(logits=True)).logits[0]
    wanted = logits(models.load(folder, dtype="float32"))
    mesh = make_mesh("model=2", jax.devices()[:2])
    split = models.load(folder, dtype="float32", mesh=mesh)
    assert split.params["layers"][0]["mlp"]["blocks"]["up"]["kernel"].sharding.spec[1] == "model"
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(
            jax.jit(lambda params: split.lm(params, block_of(IDS), None, wants=Wants(logits=True)).logits[0])(
                split.params
            ),
            wanted,
            rtol=2e-4,
            atol=2e-4,
        )
    whole = logits(models.load(folder, dtype="float32", weights="int8"))
    assert 0 < np.abs(whole - wanted).max() < 0.1 * np.abs(wanted).max()


def test_published_sizes():
    """The published model of 0.8B has so many parameters outside the table of embeddings and the head."""
    published = CONFIG | MLA | BLOCKS | {
        "ffn_type": "block_linear", "vocab_size": 122753, "hidden_size": 1536, "num_hidden_layers": 32,
        "num_attention_heads": 12, "num_key_value_heads": 12, "q_lora_rank": 768, "kv_lora_rank": 256,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "expert_size": 128, "num_experts": 48,
    }  # fmt: skip
    lm = models.LlamaLM(hf_config.from_hf(published))
    count = sum(x.size for x in jax.tree.leaves(lm.abstract()))
    assert (count - 2 * 122753 * 1536) / 1e9 == pytest.approx(0.8, abs=0.05)
    assert lm.config.layers[0].feed == BlockFFNConfig(48, 128, lm.config.norm)
