"""DiffusionGemma folders: passes equal to transformers', what is read and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_gemma import IMAGE, V, W, saved, theirs

from specjax import models
from specjax.lm import Block, Wants
from specjax.models import Canvas, Masked, ModelError, gemma_config, tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("gemma") / "theirs")


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder, dtype="float32")


def random(shape, seed, kind=int):
    source = np.random.default_rng(seed)
    return source.integers(2, IMAGE, shape) if kind is int else source.normal(size=shape).astype(np.float32)


LENGTHS = (11, 3, 7)
PROMPTS, CANVAS, LOGITS = random((3, 11), 0), random((3, W), 1), 3 * random((3, W, V), 2, float)


@pytest.fixture(scope="module")
def passes(model):
    """Of a ragged batch: the encoder's features, the cache, and a jitted pass over blocks after it."""
    lm, params = model.lm, model.params

    def encode(params, tokens, lengths):
        at = jnp.broadcast_to(jnp.arange(11)[None], tokens.shape)
        out = lm(params, Block(tokens, at, jnp.zeros(3, jnp.int32)), None, wants=Wants(final=True))
        cache = jax.tree.map(lambda x: x + 7, lm.init_cache(3, 24))  # what lies after a row's text does not matter
        return out.final, lm.commit(cache, out.delta, None, jnp.where(at < lengths[:, None], at, 24))

    final, cache = jax.jit(encode)(params, jnp.asarray(PROMPTS), jnp.asarray(LENGTHS))

    @jax.jit
    def read(tokens, dists, settled):
        soft = jnp.where(jnp.isnan(dists[:, :, :1]), 0, lm.soften(params, jax.nn.log_softmax(dists)))
        at = jnp.asarray(LENGTHS)[:, None] + jnp.arange(W)[None]
        out = lm.read(params, tokens, at, cache, soft, settled)
        return out.final, lm.unembed(params, out.final)

    return final, read


def test_the_encoder_is_transformers(passes):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        want = theirs().model.encoder(input_ids=torch.tensor(PROMPTS)).last_hidden_state.numpy()
    np.testing.assert_allclose(passes[0], want, atol=3e-5)


@pytest.mark.parametrize("conditioned", (False, True), ids=("first", "conditioned"))
def test_the_decoder_is_transformers(passes, conditioned):
    """Every row after a text of its own length, longer and shorter than the window."""
    torch = pytest.importorskip("torch")
    dists = jnp.asarray(LOGITS) if conditioned else jnp.full(LOGITS.shape, jnp.nan)
    got = passes[1](jnp.asarray(CANVAS), dists, jnp.zeros(3, bool))[1]
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            want = theirs()(
                input_ids=torch.tensor(PROMPTS[row : row + 1, :length]),
                decoder_input_ids=torch.tensor(CANVAS[row : row + 1]),
                self_conditioning_logits=torch.tensor(LOGITS[row : row + 1]) if conditioned else None,
            ).logits.numpy()[0]
        assert want.std() > 1
        np.testing.assert_allclose(got[row], want, atol=1e-4)


def test_text_and_canvases_are_read_side_by_side(passes):
    """A settled row is read as the encoder reads it, whatever the others are."""
    torch = pytest.importorskip("torch")
    settled = jnp.asarray([True, False, True])
    got, logits = passes[1](jnp.asarray(CANVAS), jnp.asarray(LOGITS), settled)
    alone = passes[1](jnp.asarray(CANVAS), jnp.asarray(LOGITS), jnp.zeros(3, bool))[1]
    np.testing.assert_allclose(logits[1], alone[1], atol=1e-5)
    for row in (0, 2):
        text = np.concatenate([PROMPTS[row, : LENGTHS[row]], CANVAS[row]])
        with torch.no_grad():
            want = theirs().model.encoder(input_ids=torch.tensor(text[None])).last_hidden_state.numpy()[0]
        np.testing.assert_allclose(got[row], want[LENGTHS[row] :], atol=3e-5)


def test_experts_drop_no_token(model):
    """Every token asks for the same experts: each gets what it gets alone."""
    layer = model.lm.bind(model.params).layers[0]
    x = jnp.asarray(random((9, 16), 3, float))
    chosen, weights_of = jnp.tile(jnp.asarray([[2, 4]]), (9, 1)), jnp.tile(jnp.asarray([[0.75, 0.5]]), (9, 1))
    together = layer.experts(x, weights_of, chosen)
    want = np.zeros((9, 16))
    for expert, weight in ((2, 0.75), (4, 0.5)):
        gate, up = np.split(x @ layer.experts.gate_up.kernel[expert], 2, axis=-1)
        want += weight * np.asarray((jax.nn.gelu(gate) * up) @ layer.experts.down.kernel[expert])
    np.testing.assert_allclose(together, want, atol=1e-4)


def test_a_folder_gives_back_what_was_saved(model, folder, tmp_path):
    how = Canvas(-1, False, W, IMAGE, (("steps", 7), ("bound", 0.25), ("t_max", 0.9)))
    models.save(tmp_path / "ours", model.lm, model.params, eos_ids=(1, 5), diffusion=how)
    again = models.load(tmp_path / "ours", dtype="float32")
    assert dict(again.masked.sampling) == dict(how.sampling) and again.masked.block == W and again.eos_ids == (1, 5)
    assert again.lm == model.lm and model.masked == Canvas(-1, False, W, IMAGE)
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(model.params)))
    vision = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
    own = {name for name in tensors.read_folder(folder) if not name.startswith(vision)}
    assert set(tensors.read_folder(tmp_path / "ours")) == own


def test_shared_tensors_are_read_under_either_name(model, folder, tmp_path):
    """As files write them whose encoder came first; what is there twice must agree."""
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(folder / "model.safetensors")
    keep = (".layer_scalar", "self_conditioning")
    renamed = {
        name
        if any(word in name for word in keep)
        else name.replace("model.decoder.", "model.encoder.language_model."): x
        for name, x in tensors.items()
    }
    renamed["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"]
    other = shutil.copytree(folder, tmp_path / "other")
    safetensors.save_file(renamed, other / "model.safetensors")
    again = models.load(other, dtype="float32")
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(model.params)))
    safetensors.save_file(renamed | {"lm_head.weight": 2 * renamed["lm_head.weight"]}, other / "model.safetensors")
    with pytest.raises(ModelError, match=r"differs from .*embed_tokens"):
        models.load(other, dtype="float32")


def test_the_default_config_is_transformers():
    """Fields that a file leaves out, and the layout before `per_layer_config`."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    shape, how = gemma_config.from_hf(
        {"model_type": "diffusion_gemma", "text_config": {**sizes, "num_global_key_value_heads": 2}}, {}
    )
    want = transformers.DiffusionGemmaTextConfig(**sizes, num_global_key_value_heads=2)
    for kind, own in (("full_attention", shape.full), ("sliding_attention", shape.sliding)):
        of_kind = want.per_layer_config[kind]
        assert (own.head_dim, own.num_key_value_heads) == (of_kind.head_dim, of_kind.num_key_value_heads)
    assert [("full_attention", "sliding_attention")[s] for s in shape.sliding_layers] == want.layer_types
    for name in ("vocab_size", "hidden_size", "intermediate_size", "sliding_window", "max_position_embeddings"):
        assert getattr(shape, name) == getattr(want, name)
    assert how == Canvas(-1, False, 256, 258880) and shape.full.rotated == 64


@pytest.mark.parametrize(
    ("where", "change", "said"),
    (
        (None, {"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        (None, {"canvas_length": 0}, "canvas_length of at least 1, got 0"),
        ("text_config", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ("text_config", {"num_experts": None}, "positive integers for: num_experts"),
        ("text_config", {"layer_types": ["chunked"] * 3}, "unknown kinds: chunked"),
        ("text_config", {"per_layer_config": {"1": {"head_dim": 4}}}, "one head_dim and num_key_value_heads"),
        (
            "text_config",
            {"moe_intermediate_size": 13},
            r"gate_up_proj has shape \[5, 24, 16\], config.json says \[5, 26",
        ),
        ("text_config", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
    ),
)
def test_a_bad_folder_is_one_clear_error(folder, tmp_path, where, change, said):
    spoilt = shutil.copytree(folder, tmp_path / "spoilt")
    config = json.loads((spoilt / "config.json").read_text())
    (config if where is None else config[where]).update(change)
    (spoilt / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        models.load(spoilt, dtype="float32")


def test_a_model_is_saved_as_what_it_is(model, tmp_path):
    with pytest.raises(ModelError, match="saved with its canvas"):
        models.save(tmp_path / "x", model.lm, model.params, diffusion=Masked(3, False))
    llama = models.LlamaLM(models.llama_config(24, 16, 20, 1, 2, 2, 8))
    with pytest.raises(ModelError, match="has a Masked"):
        models.save(tmp_path / "x", llama, llama.abstract(), diffusion=model.masked)


def test_another_sampler_is_refused():
    with pytest.raises(ModelError, match="sampler 'Other' is not supported"):
        gemma_config._sampling({"sampler_config": {"_cls_name": "Other"}})


def test_what_the_encoder_does_not_read_is_refused(model):
    block = Block(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="reads nothing but whole blocks"):
        model.lm(model.params, block, None, wants=Wants(final=True), past=1)
