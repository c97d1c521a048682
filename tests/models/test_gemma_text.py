"""Folders of Gemma's text models: what is read and refused. Logits, texts and what is written are compared beside Llama's."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from support.shapes import changed, small

import specjax
from specjax import models
from specjax.draft import DynamicExit, Swift
from specjax.draft.heads.folder import fingerprint
from specjax.lm import Block, Partial, Wants
from specjax.models import LlamaLM, ModelError, hf_config, llama_config, mlp, tensors
from specjax.models.few_bits import is_quantised
from specjax.models.formats import read_format

safetensors = pytest.importorskip("safetensors.numpy")
GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3n_text", "gemma4", "gemma4_moe", "gemma4_small")


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(map(np.array_equal, *map(jax.tree.leaves, (a, b))))


def spoilt(folder, to, change):
    """A copy of a folder whose tensors are changed."""
    copy = shutil.copytree(folder, to)
    safetensors.save_file(change(safetensors.load_file(folder / "model.safetensors")), copy / "model.safetensors")
    return copy


@pytest.mark.parametrize("name", GEMMAS)
def test_every_tensor_counts(references, tmp_path, name):
    """One that is missing or over is named."""
    folder = references(name).folder
    for at, tensor in enumerate(sorted(tensors.read_folder(folder))):
        if at % 7 == 0:
            copy = spoilt(
                folder, tmp_path / str(at), lambda own, name=tensor: {k: x for k, x in own.items() if k != name}
            )
            with pytest.raises(ModelError, match=f"missing {tensor} "):
                models.load(copy)
    more = {"model.layers.1.self_attn.sinks": np.zeros(4, np.float32)}
    copy = spoilt(folder, tmp_path / "more", lambda own: own | more)
    with pytest.raises(ModelError, match=r"unused model.layers.1.self_attn.sinks \[4\]"):
        models.load(copy)


@pytest.mark.parametrize(
    ("name", "prefix", "others"),
    (
        ("gemma3", "model.language_model.", ("model.vision_tower.encoder",)),
        ("gemma3", "language_model.model.", ("vision_tower.encoder",)),
        (
            "gemma3n_text",
            "model.language_model.",
            ("model.vision_tower.a", "model.audio_tower.a", "model.embed_audio.a"),
        ),
    ),
    ids=("new", "old", "3n"),
)
def test_the_text_part_of_a_whole_model(references, tmp_path, name, prefix, others):
    """As transformers 5 and the published files name them; what reads images and sound is left out."""
    folder = references(name).folder
    left_out = {f"{other}.weight": np.ones(3, np.float32) for other in others}
    copy = spoilt(
        folder,
        tmp_path / "whole",
        lambda own: {prefix + k.removeprefix("model."): x for k, x in own.items()} | left_out,
    )
    text = json.loads((copy / "config.json").read_text())
    kind = name.removesuffix("_text")
    whole = {
        "architectures": [f"{kind.capitalize()}ForConditionalGeneration"],
        "model_type": kind,
        "eos_token_id": [2, 9],
    }
    kept = {name: x for name, x in text.items() if name not in ("architectures", "eos_token_id")}
    (copy / "config.json").write_text(json.dumps(whole | {"text_config": kept}))
    (copy / "generation_config.json").unlink()  # which would say where texts end
    plain, model = (models.load(x, dtype="float32") for x in (folder, copy))
    assert model.lm == plain.lm and same(model.params, plain.params) and set(model.eos_ids) == {2, 9}


@pytest.mark.parametrize("kind", ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"))
def test_a_config_says_what_transformers_makes_of_it(kind):
    """Fields that a file leaves out, and the layout of transformers 4."""
    import transformers

    classes = {
        "gemma": "GemmaConfig", "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig", "gemma4_text": "Gemma4TextConfig",
        "gemma3n_text": "Gemma3nTextConfig",
    }  # fmt: skip
    large = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    more = {
        "gemma": {"hidden_act": "gelu", "rope_theta": 1e5, "tie_word_embeddings": False},
        "gemma3_text": {"num_hidden_layers": 13, "sliding_window_pattern": 3} | old,
        "gemma3n_text": old | {
            "num_hidden_layers": 6, "intermediate_size": [8, 9, 8, 8, 8, 7], "num_kv_shared_layers": 1, "altup_num_inputs": 2,
            "laurel_rank": 3, "query_pre_attn_scalar": 256, "final_logit_softcapping": 20.0, "attention_bias": True,
        },
        "gemma4_text": large,
    }  # fmt: skip
    for given in ({}, more.get(kind, {})):
        theirs = json.loads(getattr(transformers, classes[kind])(**given).to_json_string(use_diff=False))
        bare = hf_config.from_hf({"model_type": kind} | given)
        assert bare == hf_config.from_hf(theirs | {"architectures": None, "model_type": kind})
        written = hf_config.to_hf(bare)
        again = getattr(transformers, classes[kind]).from_dict(written).to_json_string(use_diff=False)
        assert hf_config.from_hf(written) == bare == hf_config.from_hf(json.loads(again))
    if kind == "gemma3_text":
        full, sliding = bare.attention(2), bare.attention(0)
        assert (full.rope.theta, full.rope.scaling.factor, full.window) == (5e5, 8.0, None)
        assert (sliding.rope.theta, sliding.rope.scaling, sliding.window) == (3e4, None, 4096)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    (
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported; Gemma2ForCausalLM has"),
        ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping must be a positive number, not -1"),
        ("gemma2", {"sliding_window": None}, "sliding_window must be a positive integer, not None"),
        ("gemma2", {"head_dim": None}, "positive integers for: head_dim"),
        ("gemma2", {"num_key_value_heads": 3}, "8 attention heads do not split over 3 key-value heads"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, not 0"),
        ("gemma2", {"num_hidden_layers": 10**6}, "models of up to 1000 layers are read"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a number of layers, not 0"),
        ("gemma3_text", {"layer_types": ["chunked"] * 26}, "layer_types has unknown kinds: chunked"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters has rope_type; use full_attention",
        ),
        ("gemma3_text", {"quantization_config": {}}, "has a quantization_config"),
        (
            "gemma3n_text",
            {"altup_num_inputs": 0},
            "altup_num_inputs 0, laurel_rank 64, hidden_size_per_layer_input 256 must be sizes",
        ),
        ("gemma3n_text", {"intermediate_size": [8] * 34}, "intermediate_size must have a size for each layer, not"),
        ("gemma3n_text", {"intermediate_size": []}, "positive integers for: intermediate_size"),
        ("gemma3_text", {"intermediate_size": [8] * 26}, "positive integers for: intermediate_size"),
        (
            "gemma3n_text",
            {"activation_sparsity_pattern": [1.0] * 35},
            "pattern must have a share below 1 for each layer",
        ),
        ("gemma3n_text", {"activation_sparsity_pattern": 0.95}, "for each layer, not 0.95"),
        ("gemma3n_text", {"num_kv_shared_layers": 31}, "num_kv_shared_layers 31 of 35 must leave a layer of each kind"),
        ("gemma3n_text", {"altup_active_idx": 1}, "altup_active_idx 1 is not supported"),
        ("gemma3n_text", {"altup_correct_scale": False}, "altup_correct_scale False is not supported"),
    ),
)
def test_what_cannot_be_served_is_named(kind, change, said):
    with pytest.raises(ModelError, match=said):
        hf_config.from_hf({"model_type": kind} | change)


def test_what_no_family_has_is_not_written():
    plain = llama_config(24, 16, 20, 1, 2, 2, 8)
    gemma = hf_config.from_hf({"model_type": "gemma2", "num_hidden_layers": 2})
    with pytest.raises(ModelError, match="2 attention heads do not split over 3"):
        hf_config.to_hf(llama_config(24, 16, 20, 1, 2, 3, 8))
    for config, said in (
        (changed(plain, final_logit_softcapping=3.0), "has head.soft_cap=3.0 with the rest"),
        (
            changed(gemma, hidden_act="silu"),
            "has layers.feed.hidden_act='silu' with the rest of this model; Gemma2ForCausalLM",
        ),
        (changed(gemma, mlp_bias=True), "has layers.feed.bias=True with the rest of this model; Gemma2ForCausalLM"),
        (
            changed(gemma, attention_scale=0.3),
            "has layers.mixer.scale=0.3 with the rest of this model; Gemma2ForCausalLM",
        ),
    ):
        with pytest.raises(ModelError, match=said):
            hf_config.to_hf(config)


def test_a_heads_own_layers_are_llamas():
    from specjax.draft.feature import layers_config

    gemma = hf_config.from_hf({"model_type": "gemma3_text"})
    assert layers_config(LlamaLM(gemma), "eagle") == small(
        262208, 2304, 9216, 1, 8, 4, 256, 131072, tie_word_embeddings=True, qk_norm=True
    )


def test_a_draft_heads_columns_are_those_before_the_cap(references):
    from specjax.draft.head import head_kernel

    model = models.load(references("gemma2").folder, dtype="float32")
    table = np.asarray(model.params["embed"]["embedding"])
    assert abs(table).max() > 0.3  # a cap of 3 would move it by 0.3%
    np.testing.assert_allclose(head_kernel(model.lm, model.params), table.T, atol=1e-6)


def test_what_gemma_4_cannot_have_here_is_named():
    for change, said in (
        (
            {"hidden_size_per_layer_input": -1},
            "hidden_size_per_layer_input -1 and vocab_size_per_layer_input 262144 must be",
        ),
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers 30 of 30 must leave a layer of each kind that has keys"),
        ({"num_kv_shared_layers": 25}, "num_kv_shared_layers 25 of 30 must leave"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"enable_moe_block": True}, "positive integers for: num_experts"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope of full_attention layers has type 'yarn'",
        ),
        ({"rope_parameters": 3}, "rope_parameters must be an object, not 3"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention must be an object"),
        ({"per_layer_config": [1]}, "per_layer_config must be an object"),
        ({"per_layer_config": {"a": {}}}, "per_layer_config has 'a', which is not a layer's number"),
        ({"per_layer_config": {"05": 3}}, "per_layer_config.05 must be an object"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts 5 is above 4",
        ),
    ):
        with pytest.raises(ModelError, match=said):
            hf_config.from_hf({"model_type": "gemma4_text"} | change)


@pytest.mark.slow
def test_layers_that_share_keys_need_what_is_below_them(references, tmp_path):
    """They have no keys in the cache, and a file may hold tensors of theirs that nobody reads."""
    model = models.load(references("gemma4_small").folder, dtype="float32")
    lm, params = model.lm, model.params
    assert [lm.config.source(i) for i in range(5)] == [0, 1, 2, 1, 2] and len(lm.init_cache(1, 8).key) == 3
    assert "k" not in params["layers"][3]["attention"] and "k" in params["layers"][2]["attention"]
    tokens = np.arange(6)[None]
    block = Block(tokens, tokens, np.zeros(1, np.int32))
    h, below = lm.layers(params, lm.embed(params, tokens), 0, 3, block, None)
    with pytest.raises(ValueError, match="layer 3 reads the keys of layer 1: pass layers"):
        lm.layers(params, h, 3, 5, block, None)
    h, above = lm.layers(params, h, 3, 5, block, None, below=below)
    assert len(below.key) == 3 and above.key == ()
    whole = lm(params, block, None, wants=Wants(hidden=(4,))).hidden[4]
    np.testing.assert_allclose(h, whole, atol=1e-5)
    unread = {"model.layers.4.self_attn.k_proj.weight": np.ones((2, 2), np.float32)}
    again = models.load(spoilt(references("gemma4_small").folder, tmp_path / "more", lambda own: own | unread))
    assert same(again.params, params)


def test_sizes_of_published_models():
    """Parameters in billions, as their model cards say them, the embedding counted once."""
    count = lambda name: sum(leaf.size for leaf in jax.tree.leaves(models.abstract(name).params))
    for name, billions in (("google/gemma-7b", 8.54), ("google/gemma-2-27b-it", 27.2), ("google/gemma-3-27b-it", 27.0)):
        assert abs(count(name) / 1e9 - billions) < 0.1, (name, count(name))
    # of the text alone, which cards do not give: those of transformers' models of the published configs
    assert count("google/gemma-3n-E2B-it") == 4_435_182_688 and count("google/gemma-3n-E4B-it") == 6_835_235_568


def test_gates_are_cut_off_by_hand():
    """The mean of 1, 2, 3 and 6 is 3, and their variance 3.5; 75% of a normal distribution is below 0.67449 deviations."""
    got = mlp.cut_off(np.float32([[1, 2, 3, 6], [13, 11, 12, 16]]), 0.75)
    above = 3 - 0.67449 * 3.5**0.5
    np.testing.assert_allclose(got, [[0, 0, 0, above], [0, 0, 0, above]], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.covers("kangaroo", "del", "swift")
def test_streams_go_from_layer_to_layer(references):
    """All of them, as transformers has them; heads read the first, and a pass goes on after any layer."""
    import torch

    reference = references("gemma3n_text")
    model, ids = models.load(reference.folder, dtype="float32"), np.random.default_rng(3).integers(0, 128, (2, 11))
    lm, params, theirs = model.lm, model.params, []
    keep = lambda module, given, found: theirs.append(found.clone().numpy())
    hooks = [layer.register_forward_hook(keep) for layer in reference.torch.model.layers]
    with torch.no_grad():
        final = reference.torch.model(torch.as_tensor(ids)).last_hidden_state.numpy()
    for hook in hooks:
        hook.remove()
    block = Block(ids, np.broadcast_to(np.arange(11)[None], ids.shape), np.zeros(2, np.int32))

    @jax.jit
    def passes(params, skip):
        h, below = lm.layers(params, lm.embed(params, ids), 0, 2, block, None)
        rest = lm(params, block, None, wants=Wants(hidden=(1, 2), final=True), partial=Partial(h, below, 2))
        branches, _ = lm.layers(params, lm.embed(params, ids), 0, 3, block, None, skip=skip)
        return h, rest, lm.norm(params, branches)

    h, rest, in_branches = passes(params, np.zeros((3, 2), bool))
    assert h.shape == (2, 11, lm.config.stream_size) and theirs[1].shape == (3, 2, 11, 64)
    np.testing.assert_allclose(h, np.concatenate(theirs[1], axis=-1), atol=1e-4)
    for layer in (1, 2):
        np.testing.assert_allclose(rest.hidden[layer], theirs[layer][0], atol=1e-4)
    for found in (rest.final, in_branches):
        np.testing.assert_allclose(found, final, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", (DynamicExit(exits=(1, 2)), Swift()), ids=("del", "swift"))
def test_drafters_that_run_layers_of_several_streams_make_a_step(drafter):
    """It is traced: the texts of one that stops early are compared with those of transformers' (kangaroo)."""
    sizes = {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 1,
        "vocab_size": 96,
        "intermediate_size": 32,
        "hidden_size": 32,
    }
    lm = LlamaLM(hf_config.from_hf({"model_type": "gemma3n_text"} | sizes))
    decoder, params = specjax.speculative(lm, drafter), {"target": lm.abstract()}
    state = jax.eval_shape(lambda params: decoder.empty(params, 2, 64), params)
    assert jax.eval_shape(decoder.step, params, state)[0].tokens.shape == (2, 64)


def test_what_reads_streams_knows_them(references):
    """A head's folder knows its target by how streams are joined; small matrices stay plain; the rest is refused."""
    model = models.load(references("gemma3n_text").folder, dtype="float32")
    streams = model.params["streams"]
    turned = streams | {"leave": jax.tree.map(lambda x: -x, streams["leave"])}
    other = dataclasses.replace(model, params=model.params | {"streams": turned})
    assert fingerprint(model) != fingerprint(other)
    layer = read_format("int8:vocab=true").shapes(model.lm.abstract())["layers"][0]
    assert is_quantised(layer["laurel"]["left"]["kernel"])
    assert not any(map(is_quantised, jax.tree.leaves(layer["altup"], is_leaf=is_quantised)))
    with pytest.raises(ModelError, match="cannot be widened: its layers have inputs of their own"):
        models.widen(model, 2)
    with pytest.raises(
        ValueError, match="several residual streams .AltUp. is not read by its values: take another cache"
    ):
        model.lm.values(model.params, np.zeros((1, 2, 64), np.float32), 0)
